// What a call on a GPU asks the driver for, without a GPU: launches and little else; and that what
// is kept from call to call follows contexts and streams.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <set>
#include <thread>
#include <vector>

#include "cuda/set.h"
#include "cuda/tensor_map.h"
#include "decode_sizes.h"
#include "deltic/deltic.h"
#include "fake_cuda.h"

namespace deltic::test {
namespace {

using Counts = std::map<std::string, int>;

// Memory that nobody reads.
deltic_tensor tensor(int32_t dtype, std::initializer_list<int64_t> shape) {
  static std::atomic<uintptr_t> free{uintptr_t{1} << 40};
  deltic_tensor t{};
  t.dtype = dtype, t.device_type = DELTIC_CUDA;
  for (const int64_t n : shape) t.shape[t.rank++] = n;
  int64_t elements = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) t.strides[i] = elements, elements *= t.shape[i];
  t.data =
      reinterpret_cast<void*>(free.fetch_add(static_cast<uintptr_t>(elements + 64) * 4 / 64 * 64));
  return t;
}

// KDA in bf16, or decode with a state of bf16: instances of every build.
struct Sample {
  deltic_options options;
  deltic_tensors tensors;
  bool is_decode;

  explicit Sample(int64_t T, bool decode = false, int64_t HV = 2) : is_decode(decode) {
    constexpr int64_t kWidth = 128;
    deltic_options_init(&options, sizeof options);
    deltic_tensors_init(&tensors, sizeof tensors);
    options.gate_form = DELTIC_GATE_BOUNDED, options.has_lower_bound = 1, options.lower_bound = -5;
    options.state_layout = DELTIC_STATE_VK;
    for (deltic_tensor* t : {&tensors.q, &tensors.k, &tensors.v, &tensors.o, &tensors.g})
      *t = tensor(DELTIC_BF16, {1, T, HV, kWidth});
    tensors.beta = tensor(DELTIC_BF16, {1, T, HV});
    if (decode) tensors.state_pool = tensor(DELTIC_BF16, {1, HV, kWidth, kWidth});
  }
  uint64_t bytes(void* stream) const {
    uint64_t found = 0;
    const auto query = is_decode ? deltic_decode_workspace : deltic_forward_workspace;
    EXPECT_EQ(query(&options, &tensors, stream, &found), DELTIC_OK) << deltic_last_error();
    return found;
  }
  // What the call alone asked for.
  const fake::Seen& run(void* stream) const {
    const deltic_workspace workspace = {reinterpret_cast<void*>(uintptr_t{1} << 50), bytes(stream)};
    fake::seen() = {};
    const auto call = is_decode ? deltic_decode : deltic_forward;
    EXPECT_EQ(call(&options, &tensors, &workspace, stream), DELTIC_OK) << deltic_last_error();
    return fake::seen();
  }
};

TEST(HostCalls, AForwardAsksForItsMapsAndLaunches) {
  const Sample sample(128);
  sample.run(nullptr);
  const fake::Seen& seen = sample.run(nullptr);
  // Maps are kept; of tensors that lie elsewhere they get the address.
  EXPECT_EQ(
      seen.calls,
      (Counts{
          {"cuCtxGetCurrent", 1}, {"cuCtxGetId", 1}, {"cuStreamGetCtx", 1}, {"cudaGetDevice", 1}}));
  EXPECT_EQ(seen.grids, (std::vector<unsigned>{1, 132}));  // plan and kernel
  fake::seen() = {};
  sample.bytes(nullptr);
  EXPECT_EQ(fake::seen().calls, (Counts{{"cuCtxGetId", 1}, {"cuStreamGetCtx", 1}}));
  const Sample elsewhere(128);
  const Counts found = elsewhere.run(nullptr).calls;
  EXPECT_EQ(found.at("cuTensorMapReplaceAddress"), 5);
  EXPECT_EQ(found.count("cuTensorMapEncodeTiled"), 0u);
}

// Whatever was asked for before, and on whichever thread, a map is the one that the driver makes of
// these rows.
TEST(HostCalls, AKeptMapIsTheOneOfItsRows) {
  std::vector<Rows> rows;
  for (int i = 0; i < 6; ++i) {
    for (const int64_t stride : {256, 384}) {
      for (const DType type : {DType::bf16, DType::f16}) {
        rows.push_back({reinterpret_cast<void*>(uintptr_t{4096} << i), type, true, 64 * 2 * stride,
                        2 * stride, stride});
      }
    }
  }
  struct Shape {
    int64_t batches, tokens, heads, width;
    gpu::Box box;
  };
  const Shape shapes[] = {{1, 64, 2, 128, gpu::Box::wide}, {1, 64, 2, 128, gpu::Box::narrow},
                          {2, 64, 2, 128, gpu::Box::wide}, {1, 65, 2, 128, gpu::Box::wide},
                          {1, 64, 1, 128, gpu::Box::wide}, {1, 64, 2, 64, gpu::Box::wide},
                          {1, 0, 2, 128, gpu::Box::wide}};
  void* const fallback = reinterpret_cast<void*>(uintptr_t{1} << 30);
  const auto make = [&](const Rows& x, const Shape& s) {
    return gpu::make_map("test", x, s.batches, s.tokens, s.heads, s.width, fallback, s.box);
  };
  uint32_t random = 1;
  for (int round = 0; round < 2000; ++round) {
    random = random * 1664525u + 1013904223u;
    const Rows& x = rows[(random >> 8) % (round % 3 == 0 ? rows.size() : 3)];
    const Shape& s = shapes[(random >> 20) % (round % 2 == 0 ? std::size(shapes) : 2)];
    const CUtensorMap found = make(x, s);
    CUtensorMap alone;  // a new thread has nothing kept
    std::thread([&] { alone = make(x, s); }).join();
    ASSERT_EQ(std::memcmp(&found, &alone, sizeof found), 0) << round;
  }
}

TEST(HostCalls, SegmentsAskNoOftener) {
  const Sample sample(8192);
  sample.run(nullptr);
  const fake::Seen& seen = sample.run(nullptr);
  EXPECT_EQ(seen.calls.at("cuStreamGetCtx"), 1);
  EXPECT_EQ(seen.calls.count("cuTensorMapEncodeTiled"), 0u);
  EXPECT_EQ(seen.calls.count("cudaFuncSetAttribute"), 0u);
  EXPECT_EQ(seen.calls.count("cuCtxGetDevResource"), 0u);
  EXPECT_GE(seen.grids.size(), 5u);
}

TEST(HostCalls, ADecodeIsOneLaunch) {
  const Sample sample(1, true);
  sample.run(nullptr);
  const fake::Seen& seen = sample.run(nullptr);
  EXPECT_EQ(seen.calls, (Counts{{"cuCtxGetCurrent", 1},
                                {"cuCtxGetId", 1},
                                {"cudaGetDevice", 1},
                                {"cudaGetLastError", 1}}));
  EXPECT_EQ(seen.grids.size(), 1u);
}

// The kernel that a decode runs on 132 SMs; null where the build has it not.
const void* kernel_of(const ServedDecode& x, int32_t state, bool is_v_first, bool is_per_channel) {
  constexpr int64_t kKeys = 128, kValues = 8;
  Sample sample(1, true);
  deltic_tensors& t = sample.tensors;
  int64_t B = x.sequences, T = x.tokens;
  if (x.is_packed) {
    B = 1, T = 0;
    for (int64_t n = 0; n < x.sequences; ++n) T += x.length_of(n);
    t.cu_seqlens = tensor(DELTIC_I32, {x.sequences + 1});
  }
  t.q = tensor(DELTIC_BF16, {B, T, 1, kKeys}), t.k = tensor(DELTIC_BF16, {B, T, 1, kKeys});
  t.v = tensor(DELTIC_BF16, {B, T, x.heads, kValues}),
  t.o = tensor(DELTIC_BF16, {B, T, x.heads, kValues});
  t.g = is_per_channel ? tensor(DELTIC_BF16, {B, T, x.heads, kKeys})
                       : tensor(DELTIC_BF16, {B, T, x.heads});
  t.beta = tensor(DELTIC_BF16, {B, T, x.heads});
  t.state_pool = {};
  sample.options.state_layout = is_v_first ? DELTIC_STATE_VK : DELTIC_STATE_KV;
  const auto states = [&] {
    return is_v_first ? tensor(state, {x.sequences, x.heads, kValues, kKeys})
                      : tensor(state, {x.sequences, x.heads, kKeys, kValues});
  };
  t.initial_state = states();
  if (x.is_kept) t.final_state = states();
  sample.options.impl = "cuda.decode";
  const deltic_workspace workspace{};
  fake::seen() = {};
  const deltic_status status = deltic_decode(&sample.options, &t, &workspace, nullptr);
  if (status == DELTIC_UNSUPPORTED) return nullptr;
  EXPECT_EQ(status, DELTIC_OK) << deltic_last_error();
  EXPECT_EQ(fake::seen().launched.size(), 1u);
  return fake::seen().launched.empty() ? nullptr : fake::seen().launched[0];
}

// So many kernels, or none at all of states that the build has no instance for.
void expect_kernels(const std::set<const void*>& found, size_t wanted, bool is_in_every_set) {
  if (gpu::kFullSet || is_in_every_set) {
    EXPECT_EQ(found.size(), wanted);
    EXPECT_FALSE(found.contains(nullptr)) << deltic_last_error();
  } else {
    EXPECT_EQ(found, std::set<const void*>{nullptr});
  }
}

// What the tests of bits on a GPU go through is every kernel that there is for such states.
TEST(HostCalls, ServersDecodesReachKernelsOfTheirOwn) {
  const ServedDecode& tokens = kServedDecodes[0];
  const ServedDecode& waves = kServedDecodes[1];
  const ServedDecode& each = kServedDecodes[2];
  const ServedDecode& packed = kServedDecodes[3];
  const ServedDecode& each_of_many = kServedDecodes[4];
  const ServedDecode& unkept = kServedDecodes[5];
  for (const bool per_channel : {false, true}) {
    const auto kernels = [&](int32_t state, bool is_v_first,
                             std::initializer_list<const ServedDecode*> sizes) {
      std::set<const void*> all;
      for (const ServedDecode* x : sizes) all.insert(kernel_of(*x, state, is_v_first, per_channel));
      return all;
    };
    for (const int32_t half : {DELTIC_BF16, DELTIC_F16}) {
      const auto v_first = kernels(
          half, true,
          {&tokens, &waves, &packed, &each, &each_of_many, &kFewTokens, &kServedStep, &kManyStep});
      // With decays per channel a token each of many is for the kernel of several tokens.
      expect_kernels(v_first, per_channel ? 7 : 8, half == DELTIC_BF16);
      const auto k_first = kernels(half, false, {&tokens, &kServedStep, &kFewStep});
      expect_kernels(k_first, 3, false);
    }
    const auto v_first =
        kernels(DELTIC_F32, true,
                {&tokens, &unkept, &kFewTokens, &each, &each_of_many, &kServedStep, &kManyStep});
    // With decays per channel a token of many is for warps that work alone, too.
    expect_kernels(v_first, per_channel ? 5 : 7, false);
    const auto k_first = kernels(DELTIC_F32, false, {&tokens, &kServedStep});
    expect_kernels(k_first, 2, false);
  }
}

// KDA in bf16, gradients of all inputs.
struct BackwardSample {
  Sample inputs;
  deltic_backward_tensors tensors;

  explicit BackwardSample(int64_t T, int64_t HV) : inputs(T, false, HV) {
    deltic_tensors& x = inputs.tensors;
    inputs.options.impl = "cuda.sm90.backward";
    deltic_backward_tensors_init(&tensors, sizeof tensors);
    tensors.d_o = x.o, x.o = {};
    for (deltic_tensor* t : {&tensors.dq, &tensors.dk, &tensors.dv, &tensors.dg})
      *t = tensor(DELTIC_BF16, {1, T, HV, 128});
    tensors.dbeta = tensor(DELTIC_BF16, {1, T, HV});
  }
  void pack(int64_t sequences) { inputs.tensors.cu_seqlens = tensor(DELTIC_I32, {sequences + 1}); }
  uint64_t bytes() {
    uint64_t found = 0;
    tensors.forward = &inputs.tensors;
    EXPECT_EQ(deltic_backward_workspace(&inputs.options, &tensors, nullptr, &found), DELTIC_OK)
        << deltic_last_error();
    return found;
  }
  deltic_status call(uint64_t workspace_bytes) {
    const deltic_workspace workspace = {reinterpret_cast<void*>(uintptr_t{1} << 50),
                                        workspace_bytes};
    fake::seen() = {};
    tensors.forward = &inputs.tensors;
    return deltic_backward(&inputs.options, &tensors, &workspace, nullptr);
  }
  const fake::Seen& run() {
    EXPECT_EQ(call(bytes()), DELTIC_OK) << deltic_last_error();
    return fake::seen();
  }
};

// Heads in rounds, each with all launches and in the same workspace.
TEST(HostCalls, ABackwardOfManyHeadsRunsInRounds) {
  using Grids = std::vector<unsigned>;
  BackwardSample many(8192, 96), half(8192, 48), few(8192, 32);
  // Prepare; chains, backwards of 64 columns, forwards of 128 (32 CTAs of one chain, 36 that share
  // 48); gradients.
  EXPECT_EQ(few.run().grids, (Grids{128 * 32, 2 * 32 + 32, 132}));
  EXPECT_EQ(half.run().grids, (Grids{128 * 48, 2 * 48 + 36, 132}));
  EXPECT_EQ(many.run().grids, (Grids{128 * 48, 2 * 48 + 36, 132, 128 * 48, 2 * 48 + 36, 132}));
  EXPECT_EQ(many.bytes(), half.bytes());
  EXPECT_LT(many.bytes(), uint64_t{1} << 30 | uint64_t{1} << 26);
  EXPECT_NE(many.call(many.bytes() - 1), DELTIC_OK);
  // Maps of both rounds are kept.
  EXPECT_EQ(many.run().calls.count("cuTensorMapEncodeTiled"), 0u);
  EXPECT_EQ(many.run().calls.count("cuTensorMapReplaceAddress"), 0u);
  EXPECT_EQ(many.run().calls.at("cuStreamGetCtx"), 1);
}
TEST(HostCalls, RoundsClearPaddingOnceAndParametersEach) {
  BackwardSample sample(4 * 4096, 64);
  sample.pack(4);
  deltic_tensors& x = sample.inputs.tensors;
  x.A_log = tensor(DELTIC_F32, {64}), sample.tensors.dA_log = tensor(DELTIC_F32, {64});
  const fake::Seen& seen = sample.run();
  const auto rounds = static_cast<size_t>(seen.calls.at("cudaMemsetAsync"));
  EXPECT_GE(rounds, 2u);
  EXPECT_EQ(seen.grids.size(), 1 + 4 * rounds);
  EXPECT_EQ(seen.grids[0], 128u);
  // Rows that rounds of sixteen heads fit into, and such that a round begins inside of.
  x.A_log = tensor(DELTIC_F32, {2, 32}), x.A_log.strides[0] = 40;
  sample.tensors.dA_log = tensor(DELTIC_F32, {2, 32});
  EXPECT_EQ(sample.run().grids.size(), 1 + 4 * rounds);
  BackwardSample odd(8192, 96);
  odd.inputs.tensors.A_log = tensor(DELTIC_F32, {3, 32});
  EXPECT_EQ(odd.run().grids.size(), 6u);
  odd.inputs.tensors.A_log.strides[0] = 40;
  EXPECT_EQ(odd.run().grids.size(), 3u);
  EXPECT_EQ(odd.run().grids.front(), 128u * 96);
}

// The machine is one for all threads: changed while none of them calls.
struct OnStreams : testing::Test {
  OnStreams() {
    fake::machine() = {.contexts = {{11, 132}, {12, 96}},
                       .greens = {{0, 64}, {0, 16}},
                       .streams = {{0, -1}, {0, 0}, {1, -1}, {0, 1}},
                       .current = 0};
  }
  ~OnStreams() override { fake::machine() = before; }
  const fake::Machine before = fake::machine();
  const std::vector<unsigned> sms = {132, 64, 96, 16};
};

TEST_F(OnStreams, AGridHasTheSmsOfItsStream) {
  const Sample sample(128);
  for (int round = 0; round < 3; ++round) {
    for (const size_t i : {0, 1, 0, 2, 3, 2, 1})
      EXPECT_EQ(sample.run(fake::stream(i)).grids.back(), sms[i]) << "stream " << i;
  }
}

TEST_F(OnStreams, ThreadsKeepApart) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (size_t i = 0; i < sms.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 200; ++n) {
        const size_t at = n % 5 == 0 ? 0 : i;
        const Sample sample(64 * (1 + n % 30));
        wrong += sample.run(fake::stream(at)).grids.back() != sms[at];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(OnStreams, AHandleOfAnotherContextIsAskedAgain) {
  const Sample sample(128);
  EXPECT_EQ(sample.run(nullptr).grids.back(), 132u);
  EXPECT_EQ(sample.run(nullptr).calls.count("cudaFuncSetAttribute"), 0u);
  // The same handle after the context was destroyed and another created.
  fake::machine().contexts[0] = {13, 40};
  const fake::Seen& seen = sample.run(nullptr);
  EXPECT_EQ(seen.grids.back(), 40u);
  EXPECT_EQ(seen.calls.at("cudaFuncSetAttribute"), 1);
  // Green contexts have handles alone: nothing is kept of them.
  EXPECT_EQ(sample.run(fake::stream(1)).grids.back(), 64u);
  fake::machine().greens[0].sms = 32;
  EXPECT_EQ(sample.run(fake::stream(1)).grids.back(), 32u);
}

// Kernels by their handles: as many as there are, and of the context that is current.
TEST_F(OnStreams, AKernelIsLaunchedByItsHandleInTheCurrentContext) {
  const Sample sample(128), step(1, true);
  for (int round = 0; round < 2; ++round) {
    for (const int context : {0, 1}) {
      fake::machine().current = context;
      for (const Sample* s : {&sample, &step}) {
        const fake::Seen& seen = s->run(fake::stream(context == 0 ? 0 : 2));
        EXPECT_EQ(seen.kernels.size(), seen.grids.size());
        EXPECT_EQ(seen.calls.count("cuLaunchKernelEx refused"), 0u);
        const bool is_asked = seen.calls.count("cudaGetFuncBySymbol") > 0;
        EXPECT_FALSE(round > 0 && is_asked);
      }
    }
  }
  fake::machine().current = 0;
  const std::vector<const void*> kernels = sample.run(nullptr).kernels;
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_NE(kernels[0], kernels[1]);
  // The same context's handle, another context: kernels have other handles there.
  fake::machine().contexts[0].id = 14;
  const fake::Seen& seen = sample.run(nullptr);
  EXPECT_EQ(seen.kernels, kernels);
  EXPECT_EQ(seen.calls.at("cudaGetFuncBySymbol"), 2);
  EXPECT_EQ(seen.calls.count("cuLaunchKernelEx refused"), 0u);
}
// Kept side by side, whatever place a context's number and a kernel's address give them.
TEST_F(OnStreams, HandlesOfFewContextsAreAskedForOnce) {
  const Sample step(1, true);
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 16; ++i) {
      fake::machine().contexts[0].id = 1000 + 64 * i;
      const fake::Seen& seen = step.run(nullptr);
      EXPECT_EQ(seen.calls.count("cudaGetFuncBySymbol"), round == 0 ? 1u : 0u) << i;
      EXPECT_EQ(seen.calls.count("cuLaunchKernelEx refused"), 0u);
    }
  }
}
TEST_F(OnStreams, ALaunchThatTheDriverRefusesIsTheRuntimes) {
  const Sample sample(128);
  fake::machine().takes_launches = false;
  const fake::Seen& seen = sample.run(nullptr);
  EXPECT_EQ(seen.calls.at("cuLaunchKernelEx refused"), 2);
  EXPECT_EQ(seen.grids, (std::vector<unsigned>{1, 132}));
  EXPECT_TRUE(seen.kernels.empty());
}

// The work of the host in a call from C, its workspace query included, besides what the driver
// does.
TEST(HostCalls, ACallIsMicrosecondsOfTheHost) {
  // Measured 0.9 to 1.9 us; the least of many batches counts, so that a busy machine does not.
  [[maybe_unused]] constexpr double kMostUs = 6;
  constexpr int kBatches = 200, kCalls = 10;
  struct Row {
    const char* what;
    Sample sample;
  };
  Row rows[] = {{"KDA forward, 128 tokens, 2 heads", Sample(128)},
                {"KDA forward, 8192 tokens, 96 heads", Sample(8192, false, 96)},
                {"KDA forward, 8192 tokens, 8 heads", Sample(8192, false, 8)},
                {"KDA forward, 2^20 tokens, 2 heads", Sample(int64_t{1} << 20)},
                {"GDN forward, 1024 tokens, 128 heads", Sample(1024, false, 128)},
                {"decode", Sample(1, true, 32)}};
  Sample& gdn = rows[4].sample;
  gdn.tensors.g = tensor(DELTIC_BF16, {1, 1024, 128});
  for (const Row& row : rows) {
    row.sample.run(nullptr);
    fake::machine().is_counted = false;
    double best = 1e9;
    for (int batch = 0; batch < kBatches; ++batch) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) row.sample.run(nullptr);
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count() / kCalls);
    }
    fake::machine().is_counted = true;
    std::printf("%-36s %5.2f us of the host\n", row.what, best);
#ifdef NDEBUG
    EXPECT_LT(best, kMostUs) << row.what;
#endif
  }
}

TEST_F(OnStreams, ManyShapesHaveThePlansOfEachAlone) {
  std::vector<uint64_t> alone;
  std::vector<Sample> samples;
  for (int i = 0; i < 40; ++i) samples.emplace_back(2048 + 704 * i, false, 1 + i % 5);
  for (const Sample& sample : samples)  // a new thread has nothing kept
    std::thread([&] { alone.push_back(sample.bytes(nullptr)); }).join();
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(samples[i].bytes(nullptr), alone[i]) << i;
  }
}

}  // namespace
}  // namespace deltic::test
