// What a call wakes: nobody for little work, its threads for much, and the same bits from both.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "deltic/deltic.hpp"
#include "support.h"

namespace deltic {
namespace {

int64_t threads_of_this_process() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ++count;
  return count;
}

struct Call {
  int64_t T, H, W;
  std::vector<float> x, o, state;

  Call(int64_t tokens, int64_t heads, int64_t width)
      : T(tokens),
        H(heads),
        W(width),
        x(static_cast<size_t>(T * H * W)),
        o(x.size()),
        state(static_cast<size_t>(H * W * W), 0.25f) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) * 0.01f - 0.05f;
  }
  Tensors tensors() {
    const TensorView rows(x.data(), {1, T, H, W});
    const TensorView S(state.data(), {1, H, W, W});
    Tensors t;
    t.q = t.k = t.v = rows;
    t.o = {o.data(), {1, T, H, W}};
    t.initial_state = t.final_state = S;
    return t;
  }
};

const Options kEight{.num_threads = 8};

// One test: the order matters, as threads stay once they are there.
TEST(Threads, LittleWorkWakesNobody) {
  if (std::getenv("DELTIC_WAKE") != nullptr) GTEST_SKIP() << "DELTIC_WAKE is set";
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer may have threads of its own";
  ASSERT_EQ(threads_of_this_process(), 1);
  for (const char* impl : {"", "cpu.plain"}) {
    Options options = kEight;
    options.impl = impl;
    Call step(1, 2, 16);
    decode(options, step.tensors());
    EXPECT_EQ(threads_of_this_process(), 1) << "decode " << impl;
    Call few(16, 1, 16);
    forward(options, few.tensors());
    EXPECT_EQ(threads_of_this_process(), 1) << "forward " << impl;
    std::vector<float> x(64, 1.0f), weight(64 * 4, 0.1f), out(64);
    ConvTensors conv_tensors;
    conv_tensors.x = {x.data(), {1, 1, 64}};
    conv_tensors.weight = {weight.data(), {64, 4}};
    conv_tensors.out = {out.data(), {1, 1, 64}};
    conv(options, conv_tensors);
    EXPECT_EQ(threads_of_this_process(), 1) << "conv " << impl;
    std::vector<float> norms(64);
    BlockTensors block_tensors;
    block_tensors.x = {x.data(), {1, 1, 1, 64}};
    block_tensors.out = {norms.data(), {1, 1, 1, 64}};
    block(Op::l2norm, options, block_tensors);
    EXPECT_EQ(threads_of_this_process(), 1) << "l2norm " << impl;
  }
  Call much(512, 16, 64), alone(512, 16, 64);
  forward(kEight, much.tensors());
  EXPECT_EQ(threads_of_this_process(), 8) << "the same call with much to do has its threads";
  Options one = kEight;
  one.num_threads = 1;
  forward(one, alone.tensors());
  EXPECT_EQ(much.o, alone.o);
  EXPECT_EQ(much.state, alone.state);
}

}  // namespace
}  // namespace deltic
