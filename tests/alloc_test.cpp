// Memory: a run allocates nothing, and an allocation that fails becomes a status, never a crash.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support.h"

namespace {

// Counts calls of operator new while `counting`; the one numbered `fail_at` and all after it fail.
std::atomic<bool> counting{false};
std::atomic<long> count{0}, fail_at{-1};

// Not inlined, nor `release`: g++ would take new and free for a mismatched pair.
__attribute__((noinline)) void* allocate(std::size_t bytes, std::size_t alignment) {
  if (counting.load()) {
    const long n = count.fetch_add(1);
    if (fail_at.load() >= 0 && n >= fail_at.load()) throw std::bad_alloc();
  }
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
__attribute__((noinline)) void release(void* p) noexcept { std::free(p); }

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t a) {
  return allocate(bytes, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t bytes, std::align_val_t a) {
  return allocate(bytes, static_cast<std::size_t>(a));
}
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { release(p); }

namespace deltic::test {
namespace {

// Allocations from the first to the last statement of its life.
class Watch {
 public:
  explicit Watch(long fail = -1) {
    count = 0;
    fail_at = fail;
    counting = true;
  }
  ~Watch() { counting = false; }
  long allocations() const { return count.load(); }
};

// Runs `call` with the n-th allocation failing, for n = 0, 1, ... until it needs no more than n.
template <class Call>
void fail_everywhere(const char* what, deltic_status proper, const Call& call) {
  for (long n = 0;; ++n) {
    ASSERT_LT(n, 10000) << what;
    deltic_status status;
    long needed;
    {
      const Watch watch(n);
      status = call();
      needed = watch.allocations();
    }
    EXPECT_TRUE(status == proper || status == DELTIC_OUT_OF_MEMORY)
        << what << ", allocation " << n << ": " << deltic_status_name(status) << ": "
        << deltic_last_error();
    EXPECT_NE(deltic_last_error(), nullptr);
    if (status == DELTIC_OUT_OF_MEMORY) {
      EXPECT_STRNE(deltic_last_error(), "");
    }
    if (needed <= n) {
      EXPECT_EQ(status, proper) << what;
      return;
    }
  }
}

struct Forward {
  std::vector<float> q, k, v, o, g, beta, state, pool;
  std::vector<int32_t> cu{0, 30, 70}, index{1, 0}, ckpt_cu{0, 1, 2}, tokens{10, 40}, slots{0, 1};
  std::vector<float> ckpt;
  deltic_options options;
  deltic_tensors t;
  Workspace workspace;

  Forward() {
    constexpr int64_t T = 70, H = 2, HV = 4, K = 32, V = 48;
    q.assign(T * H * K, 0.1f);
    k.assign(T * H * K, 0.1f);
    v.assign(T * HV * V, 0.1f);
    o.assign(T * HV * V, 0.0f);
    g.assign(T * HV * K, -0.1f);
    beta.assign(T * HV, 0.5f);
    pool.assign(2 * HV * K * V, 0.1f);
    ckpt.assign(2 * HV * K * V, 0.0f);
    deltic_options_init(&options, sizeof options);
    options.num_threads = 2;
    deltic_tensors_init(&t, sizeof t);
    t.q = TensorView(q.data(), {1, T, H, K});
    t.k = TensorView(k.data(), {1, T, H, K});
    t.v = TensorView(v.data(), {1, T, HV, V});
    t.o = TensorView(o.data(), {1, T, HV, V});
    t.g = TensorView(g.data(), {1, T, HV, K});
    t.beta = TensorView(beta.data(), {1, T, HV});
    t.cu_seqlens = TensorView(cu.data(), {3});
    t.state_pool = TensorView(pool.data(), {2, HV, K, V});
    t.read_index = TensorView(index.data(), {2});
    t.ckpt_cu = TensorView(ckpt_cu.data(), {3});
    t.ckpt_tokens = TensorView(tokens.data(), {2});
    t.ckpt_slots = TensorView(slots.data(), {2});
    t.ckpt_states = TensorView(ckpt.data(), {2, HV, K, V});
  }
  deltic_status run(deltic_op op) {
    const deltic_workspace w = workspace.c();
    return op == DELTIC_FORWARD ? deltic_forward(&options, &t, &w, nullptr)
                                : deltic_decode(&options, &t, &w, nullptr);
  }
  deltic_status query(deltic_op op, uint64_t* bytes) {
    return op == DELTIC_FORWARD ? deltic_forward_workspace(&options, &t, nullptr, bytes)
                                : deltic_decode_workspace(&options, &t, nullptr, bytes);
  }
};

// The very first calls of a process: lists and features are made then. Runs before all else.
TEST(AAFirstCallOfTheProcess, SurvivesAllocationFailure) {
  fail_everywhere("first list", DELTIC_OK, [] {
    const char* name = deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, 0);
    return name != nullptr ? DELTIC_OK : DELTIC_OUT_OF_MEMORY;
  });
  fail_everywhere("first info", DELTIC_OK,
                  [] { return deltic_info([](void*, const char*, const char*) {}, nullptr); });
}

TEST(Allocation, RunAllocatesNothing) {
  for (deltic_op op : {DELTIC_FORWARD, DELTIC_DECODE}) {
    for (const std::string& impl : runnable(static_cast<Op>(op))) {
      Forward f;
      f.options.impl = impl.c_str();
      if (impl == "reference") continue;  // the oracle may allocate
      uint64_t bytes = 0;
      const deltic_status asked = f.query(op, &bytes);
      if (asked == DELTIC_UNSUPPORTED) continue;
      ASSERT_EQ(asked, DELTIC_OK) << deltic_last_error();
      f.workspace.reserve(bytes);
      ASSERT_EQ(f.run(op), DELTIC_OK) << deltic_last_error();  // warm: threads, lists
      const Watch watch;
      const deltic_status status = f.run(op);
      const long allocations = watch.allocations();
      EXPECT_EQ(status, DELTIC_OK);
      EXPECT_EQ(allocations, 0) << deltic_op_name(op) << " " << impl;
    }
  }
}

TEST(Allocation, BackwardAllocatesNothing) {
  for (const std::string& impl : runnable(Op::backward)) {
    if (impl == "reference") continue;  // the oracle may allocate
    Forward f;
    std::vector<float> dq(f.q.size()), dk(f.k.size()), dv(f.v.size()), dg(f.g.size());
    deltic_backward_tensors t{};
    t.size = sizeof t;
    deltic_tensors inputs{};
    inputs.size = sizeof inputs;
    inputs.q = f.t.q, inputs.k = f.t.k, inputs.v = f.t.v;
    inputs.g = f.t.g, inputs.beta = f.t.beta, inputs.cu_seqlens = f.t.cu_seqlens;
    t.forward = &inputs;
    t.d_o = f.t.o;
    const auto like = [](deltic_tensor of, std::vector<float>& data) {
      of.data = data.data();
      return of;
    };
    t.dq = like(f.t.q, dq), t.dk = like(f.t.k, dk), t.dv = like(f.t.v, dv), t.dg = like(f.t.g, dg);
    f.options.impl = impl.c_str();
    uint64_t bytes = 0;
    const deltic_status query = deltic_backward_workspace(&f.options, &t, nullptr, &bytes);
    if (query == DELTIC_UNSUPPORTED) continue;
    ASSERT_EQ(query, DELTIC_OK) << deltic_last_error();
    const Workspace workspace(bytes);
    const deltic_workspace w = workspace.c();
    ASSERT_EQ(deltic_backward(&f.options, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();
    const Watch watch;
    const deltic_status status = deltic_backward(&f.options, &t, &w, nullptr);
    const long allocations = watch.allocations();
    EXPECT_EQ(status, DELTIC_OK);
    EXPECT_EQ(allocations, 0) << impl;
  }
}

TEST(Allocation, BlockGradientAllocatesNothing) {
  Forward f;
  constexpr int64_t T = 70, HV = 4, C = 64;
  std::vector<float> square(T * HV * C, 0.1f), d_square(T * HV * C), A_log(HV), dA_log(HV);
  std::vector<float> dk(f.k.size()), dg(f.g.size());
  const TensorView squares(square.data(), {1, T, HV, C});
  const auto like = [](deltic_tensor of, std::vector<float>& data) {
    of.data = data.data();
    return TensorView(of);
  };
  const BlockTensors keys{.k = f.t.k, .g = f.t.g, .cu_seqlens = f.t.cu_seqlens};
  BlockTensors with_a = keys;
  with_a.a = squares;
  const BlockTensors gates{
      .g = f.t.g, .A_log = TensorView(A_log.data(), {HV}), .cu_seqlens = f.t.cu_seqlens};
  const std::pair<Op, BlockBackwardTensors> calls[] = {
      {Op::cumsum,
       {.forward = gates, .d_out = f.t.g, .dg = like(f.t.g, dg), .dA_log = {dA_log.data(), {HV}}}},
      {Op::kkt, {.forward = keys, .d_out = squares, .dk = like(f.t.k, dk), .dg = like(f.t.g, dg)}},
      {Op::inverse, {.forward = {.a = squares}, .d_out = squares, .da = like(squares, d_square)}},
      {Op::wy,
       {.forward = with_a, .d_w = f.t.g, .dk = like(f.t.k, dk), .da = like(squares, d_square)}}};
  for (const auto& [op, tensors] : calls) {
    for (const std::string& impl : runnable(op)) {
      if (impl == "reference") continue;  // the oracle may allocate
      Options options{.num_threads = 2, .impl = impl};
      if (op == Op::cumsum) options.gate_form = GateForm::softplus;
      const deltic_options o = options.c();
      deltic_block_tensors inputs;
      const deltic_block_backward_tensors t = tensors.c(inputs);
      const Workspace workspace(block_backward_workspace_bytes(op, options, tensors));
      const deltic_workspace w = workspace.c();
      const auto run = [&] {
        return deltic_block_backward(static_cast<int32_t>(op), &o, &t, &w, nullptr);
      };
      ASSERT_EQ(run(), DELTIC_OK) << deltic_last_error();
      const Watch watch;
      const deltic_status status = run();
      const long allocations = watch.allocations();
      EXPECT_EQ(status, DELTIC_OK);
      EXPECT_EQ(allocations, 0) << name(op) << " " << impl;
    }
  }
}

TEST(Allocation, ConvAllocatesNothing) {
  constexpr int64_t T = 600, D = 70, W = 4;
  std::vector<float> x(T * D, 0.1f), out(T * D), dx(T * D), weight(D * W, 0.1f), dweight(D * W);
  std::vector<float> state(2 * D * W), d_state(2 * D * W);
  std::vector<int32_t> cu{0, 30, T}, index{1, 0};
  const ConvTensors inputs{.x = TensorView(x.data(), {1, T, D}),
                           .weight = TensorView(weight.data(), {D, W}),
                           .cu_seqlens = TensorView(cu.data(), {3})};
  ConvTensors tensors = inputs;
  tensors.state_pool = TensorView(state.data(), {2, D, W});
  tensors.read_index = TensorView(index.data(), {2});
  tensors.out = TensorView(out.data(), {1, T, D});
  ConvBackwardTensors gradients{.forward = inputs,
                                .d_out = TensorView(out.data(), {1, T, D}),
                                .dx = TensorView(dx.data(), {1, T, D}),
                                .dweight = TensorView(dweight.data(), {D, W}),
                                .d_initial_state = TensorView(d_state.data(), {2, D, W})};
  gradients.forward.initial_state = TensorView(state.data(), {2, D, W});
  for (const std::string& impl : runnable(Op::conv)) {
    if (impl == "reference") continue;  // the oracle may allocate
    const Options options{.num_threads = 2, .impl = impl, .activation = Activation::silu};
    const deltic_options o = options.c();
    const deltic_conv_tensors t = tensors.c();
    deltic_conv_tensors of_gradients;
    const deltic_conv_backward_tensors b = gradients.c(of_gradients);
    const Workspace workspace(std::max(conv_workspace_bytes(options, tensors),
                                       conv_backward_workspace_bytes(options, gradients)));
    const deltic_workspace w = workspace.c();
    ASSERT_EQ(deltic_conv(&o, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();
    ASSERT_EQ(deltic_conv_backward(&o, &b, &w, nullptr), DELTIC_OK) << deltic_last_error();
    const Watch watch;
    deltic_conv(&o, &t, &w, nullptr);
    deltic_conv_backward(&o, &b, &w, nullptr);
    const long allocations = watch.allocations();
    EXPECT_EQ(allocations, 0) << impl;
  }
}

TEST(Allocation, HalfPrecisionRunAllocatesNothing) {
  for (const std::string& impl : runnable(Op::forward)) {
    if (impl == "reference") continue;
    Buffer q(DType::bf16, {1, 70, 2, 64}), k(DType::bf16, {1, 70, 2, 64}),
        v(DType::bf16, {1, 70, 2, 64}), o(DType::bf16, {1, 70, 2, 64});
    for (const Buffer* b : {&q, &k, &v})
      for (int64_t i = 0; i < 70 * 2 * 64; ++i) store(b->data() + 2 * i, DType::bf16, 0.1);
    const Options options{.qk_l2norm = true, .num_threads = 2, .impl = impl};
    const Tensors tensors{.q = q.view(), .k = k.view(), .v = v.view(), .o = o.view()};
    if (!accepts(Op::forward, impl, {.H = 2, .HV = 2, .K = 64, .V = 64, .dtype = DType::bf16}))
      continue;
    const Workspace workspace(forward_workspace_bytes(options, tensors));
    const deltic_workspace w = workspace.c();
    const deltic_options c = options.c();
    const deltic_tensors t = tensors.c();
    ASSERT_EQ(deltic_forward(&c, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();
    const Watch watch;
    deltic_forward(&c, &t, &w, nullptr);
    const long allocations = watch.allocations();
    EXPECT_EQ(allocations, 0) << impl;
  }
}

TEST(Allocation, SuccessfulCallsSurviveFailure) {
  for (deltic_op op : {DELTIC_FORWARD, DELTIC_DECODE}) {
    for (const std::string& impl : runnable(static_cast<Op>(op))) {
      Forward f;
      f.options.impl = impl.c_str();
      uint64_t bytes = 0;
      if (f.query(op, &bytes) == DELTIC_UNSUPPORTED) continue;
      f.workspace.reserve(bytes);
      fail_everywhere("run", DELTIC_OK, [&] { return f.run(op); });
      fail_everywhere("query", DELTIC_OK, [&] { return f.query(op, &bytes); });
    }
  }
}

TEST(Allocation, FailingCallsSurviveFailure) {
  Forward f;
  f.options.chunk = 48;
  fail_everywhere("option", DELTIC_INVALID_ARGUMENT, [&] { return f.run(DELTIC_FORWARD); });
  f.options.chunk = 0;
  f.t.k.shape[3] = 7;
  fail_everywhere("shape", DELTIC_INVALID_ARGUMENT, [&] { return f.run(DELTIC_FORWARD); });
  f.t.k.shape[3] = 32;
  fail_everywhere("workspace", DELTIC_INVALID_ARGUMENT, [&] { return f.run(DELTIC_FORWARD); });
  f.options.impl = "cpu.abacus";
  fail_everywhere("name", DELTIC_INVALID_ARGUMENT, [&] { return f.run(DELTIC_DECODE); });
  f.options.impl = nullptr;
  for (deltic_tensor* t :
       {&f.t.q, &f.t.k, &f.t.v, &f.t.o, &f.t.g, &f.t.beta, &f.t.cu_seqlens, &f.t.state_pool,
        &f.t.read_index, &f.t.ckpt_cu, &f.t.ckpt_tokens, &f.t.ckpt_slots, &f.t.ckpt_states})
    t->device_type = DELTIC_CUDA;
  // With a GPU the call would be taken, on memory that it cannot read.
  if (deltic_implementation_runs_here(DELTIC_FORWARD, DELTIC_CUDA, 0, nullptr) == 0) {
    fail_everywhere("device", DELTIC_UNSUPPORTED, [&] { return f.run(DELTIC_FORWARD); });
  }
  fail_everywhere("abi", DELTIC_ABI_MISMATCH, [] { return deltic_check_abi(999); });
}

TEST(Allocation, ExplainSurvivesFailure) {
  Forward f;
  fail_everywhere("explain", DELTIC_OK, [&] {
    return deltic_explain(
        DELTIC_FORWARD, &f.options, &f.t, [](void*, const char*, int32_t, int32_t, const char*) {},
        nullptr);
  });
  setenv("DELTIC_IMPL", "forward:cpu.plain", 1);
  fail_everywhere("explain with a name", DELTIC_OK, [&] {
    return deltic_explain(
        DELTIC_FORWARD, &f.options, &f.t, [](void*, const char*, int32_t, int32_t, const char*) {},
        nullptr);
  });
  unsetenv("DELTIC_IMPL");
}

TEST(Allocation, LogSurvivesFailure) {
  Forward f;
  uint64_t bytes = 0;
  ASSERT_EQ(f.query(DELTIC_FORWARD, &bytes), DELTIC_OK);
  f.workspace.reserve(bytes);
  deltic_set_log([](void*, const char*) {}, nullptr);
  fail_everywhere("run with a log", DELTIC_OK, [&] { return f.run(DELTIC_FORWARD); });
  deltic_set_log(nullptr, nullptr);
}

}  // namespace
}  // namespace deltic::test
