// Threads that the system does not give: a call runs on fewer, to the same bits.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace deltic::test {
namespace {

constexpr int kMany = 24;

// A line of /proc/self/status, in its own unit.
long status_of(const std::string& key) {
  std::ifstream in("/proc/self/status");
  std::string word;
  while (in >> word) {
    if (word != key + ":") continue;
    long value = 0;
    in >> value;
    return value;
  }
  return -1;
}

// The threads that there could be besides this one, at once.
void* try_thread(void* count) {
  pthread_t next;
  if (*static_cast<int*>(count) >= kMany - 1) return nullptr;
  ++*static_cast<int*>(count);
  if (pthread_create(&next, nullptr, try_thread, count) != 0) {
    --*static_cast<int*>(count);
    return nullptr;
  }
  pthread_join(next, nullptr);
  return nullptr;
}
int threads_left() {
  int count = 0;
  try_thread(&count);
  return count;
}

// Address space for so many more stacks than there are now; a process of root's has no other limit.
class Limit {
 public:
  explicit Limit(long stacks) {
    getrlimit(RLIMIT_AS, &before_);
    pthread_attr_t attributes;
    size_t stack = 0;
    pthread_attr_init(&attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    pthread_attr_destroy(&attributes);
    rlimit less = before_;
    less.rlim_cur = static_cast<rlim_t>(status_of("VmSize")) * 1024 +
                    static_cast<rlim_t>(stacks) * (stack + (1 << 16));
    is_set_ = setrlimit(RLIMIT_AS, &less) == 0;
  }
  ~Limit() { setrlimit(RLIMIT_AS, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
  bool is_set() const { return is_set_; }

 private:
  rlimit before_{};
  bool is_set_ = false;
};

// Steps of many sequences, so that every thread has work.
struct Steps {
  static constexpr int64_t B = 64, H = 4, K = 32;
  std::vector<float> q, o, state, after;
  Tensors tensors;

  Steps() : q(B * H * K, 0.25f), o(q.size()), state(B * H * K * K, 0.5f), after(state.size()) {
    for (size_t i = 0; i < state.size(); ++i) state[i] = 0.01f * static_cast<float>(i % 101);
    const TensorView rows(q.data(), {B, 1, H, K});
    tensors = {.q = rows,
               .k = rows,
               .v = rows,
               .o = {o.data(), {B, 1, H, K}},
               .initial_state = {state.data(), {B, H, K, K}},
               .final_state = {after.data(), {B, H, K, K}}};
  }
  void run(int threads) {
    std::fill(o.begin(), o.end(), 0.0f);
    decode({.num_threads = threads}, tensors);
  }
};

TEST(Threads, FewerWhereTheSystemGivesNoMore) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs the address space that this test takes away";
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "a sanitizer needs the address space that this test takes away";
#endif
#endif
  Steps one, many;
  one.run(1);
  {
    const Limit limit(5);
    const int left = threads_left();
    if (!limit.is_set() || left == 0 || left == kMany - 1)
      GTEST_SKIP() << "no limit of address space here: " << left << " more threads under it";
    many.run(kMany);
    EXPECT_EQ(many.o, one.o);
    EXPECT_EQ(many.after, one.after);
    EXPECT_LT(status_of("Threads"), kMany);
    many.run(kMany);  // remembers what it found
    EXPECT_LT(status_of("Threads"), kMany);
  }
  // What was refused is asked for again, after a while.
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  many.run(kMany);
  EXPECT_EQ(many.o, one.o);
  EXPECT_EQ(status_of("Threads"), kMany);
}

// A workspace for many threads serves for one, at least.
TEST(Threads, OneNeedsTheSmallestWorkspace) {
  constexpr int64_t T = 150, H = 2, HV = 4, K = 64, V = 48, D = H * K;
  const TensorView rows(nullptr, DType::f32, {1, T, H, K}),
      values(nullptr, DType::f32, {1, T, HV, V}), gates(nullptr, DType::f32, {1, T, HV, K}),
      square(nullptr, DType::f32, {1, T, HV, 64}), wide(nullptr, DType::f32, {1, T, HV, K}),
      steps(nullptr, DType::f32, {1, T, D}), taps(nullptr, DType::f32, {D, 4});
  const auto expect_enough = [](Op op, const std::string& what, const auto& bytes) {
    for (const std::string& impl : runnable(op)) {
      size_t for_one = 0;
      try {
        for_one = bytes(Options{.num_threads = 1, .impl = impl});
      } catch (const Error& e) {
        ASSERT_EQ(e.kind(), ErrorKind::unsupported) << e.what();
        continue;
      }
      for (int32_t threads = 2; threads <= 9; ++threads) {
        EXPECT_GE(bytes(Options{.num_threads = threads, .impl = impl}), for_one)
            << what << " " << impl << " with " << threads << " threads";
      }
    }
  };
  const Tensors inputs{.q = rows, .k = rows, .v = values, .g = gates};
  Tensors forward = inputs;
  forward.o = values;
  expect_enough(Op::forward, "forward",
                [&](const Options& o) { return forward_workspace_bytes(o, forward); });
  expect_enough(Op::decode, "decode",
                [&](const Options& o) { return decode_workspace_bytes(o, forward); });
  expect_enough(Op::backward, "backward", [&](const Options& o) {
    return backward_workspace_bytes(o, {.forward = inputs, .d_o = values, .dq = rows, .dg = gates});
  });
  const std::pair<Op, BlockTensors> blocks[] = {
      {Op::cumsum, {.g = gates, .out = gates}},
      {Op::gate, {.g = gates, .out = gates}},
      {Op::l2norm, {.x = rows, .out = rows}},
      {Op::kkt, {.k = rows, .g = gates, .out = square}},
      {Op::scores, {.q = rows, .k = rows, .g = gates, .out = square}},
      {Op::scores_inverse, {.q = rows, .k = rows, .g = gates, .a = square, .out = square}},
      {Op::inverse, {.a = square, .out = square}},
      {Op::wy, {.k = rows, .g = gates, .a = square, .w = wide}}};
  for (const auto& [op, tensors] : blocks) {
    expect_enough(op, std::string(name(op)), [&, op = op, &t = tensors](const Options& o) {
      return block_workspace_bytes(op, o, t);
    });
    if (op == Op::scores_inverse) continue;  // its gradient is made of others
    BlockBackwardTensors gradient{.forward = tensors, .d_out = tensors.out, .d_w = tensors.w};
    gradient.forward.out = gradient.forward.w = {};
    gradient.dk = tensors.k, gradient.dg = tensors.g, gradient.da = tensors.a;
    expect_enough(op, "gradient of " + std::string(name(op)), [&, op = op](const Options& o) {
      return block_backward_workspace_bytes(op, o, gradient);
    });
  }
  expect_enough(Op::conv, "conv", [&](const Options& o) {
    return conv_workspace_bytes(o, {.x = steps, .weight = taps, .out = steps});
  });
  expect_enough(Op::conv, "gradient of conv", [&](const Options& o) {
    return conv_backward_workspace_bytes(
        o, {.forward = {.x = steps, .weight = taps}, .d_out = steps, .dx = steps, .dweight = taps});
  });
}

}  // namespace
}  // namespace deltic::test
