// Sizes that nobody has memory for: every query answers or refuses in words, what it answers is
// enough, and a call with nothing to do returns at once.
#include <gtest/gtest.h>
#include <sys/time.h>

#include <algorithm>
#include <functional>

#include "support.h"

namespace deltic::test {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t power(int n) { return int64_t{1} << n; }
using Wide = long double;  // products of powers of two are exact

// A view without memory; inputs may repeat a row of one element after the other.
deltic_tensor view(std::vector<int64_t> shape, int32_t dtype = DELTIC_F32) {
  deltic_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  t.strides[t.rank - 1] = 1;
  return t;
}
// A view of one number, for inputs that are read: every step stays where it is.
deltic_tensor view_of(float* x, std::vector<int64_t> shape) {
  deltic_tensor t = view(std::move(shape));
  t.data = x;
  return t;
}

struct Sizes {
  int64_t B = 1, T = 1, HV = 1, V = 1;
  int64_t N = -1;      // packed sequences; -1: dense
  int64_t M = -1;      // checkpoints; -1: none
  int64_t slots = -1;  // of a pool; -1: none
  int32_t num_threads = 1;
  int64_t H = 1, K = 1;
  int32_t dtype = DELTIC_F32;
  int64_t sequences() const { return N < 0 ? B : N; }
};

std::string text_of(const Sizes& s) {
  const std::vector<std::pair<const char*, int64_t>> all = {
      {"B", s.B}, {"T", s.T}, {"HV", s.HV},       {"V", s.V},
      {"N", s.N}, {"M", s.M}, {"slots", s.slots}, {"threads", s.num_threads},
      {"H", s.H}, {"K", s.K}};
  std::string text;
  for (const auto& [name, value] : all)
    text += std::string(name) + "=" + std::to_string(value) + " ";
  return text;
}

deltic_options options_of(const Sizes& s, const char* impl) {
  deltic_options o;
  deltic_options_init(&o, sizeof o);
  o.num_threads = s.num_threads;
  o.impl = impl;
  return o;
}

deltic_tensors inputs_of(const Sizes& s) {
  deltic_tensors t;
  deltic_tensors_init(&t, sizeof t);
  t.q = t.k = view({s.B, s.T, s.H, s.K}, s.dtype);
  t.v = view({s.B, s.T, s.HV, s.V}, s.dtype);
  t.g = view({s.B, s.T, s.HV});
  if (s.N >= 0) t.cu_seqlens = view({s.N + 1}, DELTIC_I64);
  return t;
}
deltic_tensors tensors_of(const Sizes& s) {
  deltic_tensors t = inputs_of(s);
  t.o = t.v;
  if (s.slots >= 0) {
    t.state_pool = view({s.slots, s.HV, s.K, s.V});
    t.read_index = view({s.sequences()}, DELTIC_I32);
  }
  if (s.M >= 0) {
    t.ckpt_cu = view({s.sequences() + 1}, DELTIC_I64);
    t.ckpt_tokens = t.ckpt_slots = view({s.M}, DELTIC_I64);
    t.ckpt_states = view({1, s.HV, s.K, s.V});
  }
  return t;
}

// A status of a query; other than OK with a sentence in the usual form.
void expect_answered(deltic_status status, const char* impl, const Sizes& s) {
  if (status == DELTIC_OK) return;
  const std::string text = deltic_last_error() + (" for " + std::string(impl) + " ") + text_of(s);
  EXPECT_EQ(status, DELTIC_INVALID_ARGUMENT) << text;
  EXPECT_NE(text.find(": expected "), std::string::npos) << text;
  EXPECT_NE(text.find(", got "), std::string::npos) << text;
}

std::vector<const char*> names(deltic_op op) {
  std::vector<const char*> all;
  for (int32_t i = 0; const char* name = deltic_implementation(op, DELTIC_CPU, i); ++i) {
    if (deltic_implementation_runs_here(op, DELTIC_CPU, i, nullptr)) all.push_back(name);
  }
  return all;
}

// Ends the program if a test hangs: spinning over 2^40 empty sequences would not end by itself. In
// time of the processor, which a busy machine takes nothing of.
class Deadline {
 public:
  Deadline() { set(kSanitized ? 300 : 60); }
  ~Deadline() { set(0); }

 private:
  static void set(time_t seconds) {
    const itimerval once{{}, {seconds, 0}};
    setitimer(ITIMER_PROF, &once, nullptr);
  }
};

const std::vector<int64_t> kExtents =
    kSanitized ? std::vector<int64_t>{0, 1, power(32) + 1, power(52), power(58)}
               : std::vector<int64_t>{0, 1, power(32) + 1, power(52), power(56), power(58)};

// Tiles multiply bf16 alone.
int32_t dtype_for(const char* impl) {
  return impl == std::string("cpu.amx") ? DELTIC_BF16 : DELTIC_F32;
}

void for_each_sizes(int32_t dtype, const std::function<void(const Sizes&)>& typed_body) {
  const auto body = [&](Sizes s) {
    s.dtype = dtype;
    typed_body(s);
  };
  for (const int64_t B : kExtents) {
    for (const int64_t T : kExtents) {
      for (const int64_t HV : kExtents) {
        for (const int64_t V : kExtents) {
          for (const int32_t threads : {1, 4096}) {
            body({.B = B, .T = T, .HV = HV, .V = V, .num_threads = threads});
            body({.B = B, .T = T, .HV = HV, .V = V, .num_threads = threads, .K = 256});
          }
        }
      }
    }
  }
  for (const int64_t N : {int64_t{0}, power(31), power(55), power(56), power(60) - 1, kHuge - 1}) {
    for (const int64_t HV : kExtents) {
      for (const int64_t T : kExtents) {
        body({.T = T, .HV = HV, .V = 16, .N = N, .num_threads = 4096, .K = 16});
        body({.T = T, .HV = HV, .V = 16, .N = N, .M = N, .K = 16});
        body({.T = T, .HV = HV, .V = 16, .N = N, .slots = N, .K = 16});
      }
    }
  }
}

// What no implementation can do without: the states of a chunked pass, the lists of slots.
Wide least_bytes(deltic_op op, const std::string& impl, const Sizes& s) {
  Wide bytes = 0;
  if (s.M > 0) bytes = Wide(s.M) * 16;
  if (s.slots >= 0) bytes = std::max(bytes, Wide(s.sequences()) * 16);
  if (s.T == 0 || s.sequences() == 0 || s.HV == 0) return bytes;
  const bool is_chunked = op == DELTIC_FORWARD && impl != "cpu.plain";
  if (is_chunked || op == DELTIC_BACKWARD) bytes = std::max(bytes, Wide(s.K) * Wide(s.V) * 4);
  return bytes;
}

TEST(Sizes, SequenceQueriesAnswerOrRefuse) {
  const Deadline deadline;
  for (const deltic_op op : {DELTIC_FORWARD, DELTIC_DECODE}) {
    const auto query = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
    for (const char* impl : names(op)) {
      for_each_sizes(dtype_for(impl), [&](const Sizes& s) {
        const deltic_options o = options_of(s, impl);
        const deltic_tensors t = tensors_of(s);
        uint64_t bytes = 0;
        const deltic_status status = query(&o, &t, nullptr, &bytes);
        expect_answered(status, impl, s);
        if (status == DELTIC_OK) {
          EXPECT_GE(Wide(bytes), least_bytes(op, impl, s)) << impl << " " << text_of(s);
        }
      });
    }
  }
}

TEST(Sizes, SavedQueriesAnswerOrRefuse) {
  const Deadline deadline;
  constexpr const char* impl = "forward";
  for_each_sizes(DELTIC_F32, [&](const Sizes& s) {
    if (s.slots >= 0) return;
    deltic_options o = options_of(s, nullptr);
    const deltic_tensors t = tensors_of(s);
    for (const int32_t save : {DELTIC_SAVE_NONE, DELTIC_SAVE_STATES, DELTIC_SAVE_ALL}) {
      o.save = save;
      uint64_t bytes = 0;
      const deltic_status status = deltic_forward_saved(&o, &t, &bytes);
      expect_answered(status, impl, s);
      if (status != DELTIC_OK || save != DELTIC_SAVE_ALL || s.N >= 0) continue;
      const Wide chunks = Wide((s.T + 63) / 64) * Wide(s.B);
      EXPECT_GE(Wide(bytes), chunks * Wide(s.HV) * Wide(s.K) * Wide(s.V) * 4)
          << impl << " " << text_of(s);
    }
  });
}

TEST(Sizes, BackwardQueriesAnswerOrRefuse) {
  const Deadline deadline;
  for (const char* impl : names(DELTIC_BACKWARD)) {
    for_each_sizes(dtype_for(impl), [&](const Sizes& s) {
      if (s.slots >= 0 || s.M >= 0) return;
      deltic_options o = options_of(s, impl);
      o.gate_form = DELTIC_GATE_SOFTPLUS;
      deltic_backward_tensors b;
      deltic_backward_tensors_init(&b, sizeof b);
      deltic_tensors f = inputs_of(s);
      b.forward = &f;
      f.A_log = b.dA_log = view({s.HV});
      b.d_o = b.dv = f.v;
      uint64_t bytes = 0;
      const deltic_status status = deltic_backward_workspace(&o, &b, nullptr, &bytes);
      expect_answered(status, impl, s);
      if (status == DELTIC_OK) {
        EXPECT_GE(Wide(bytes), least_bytes(DELTIC_BACKWARD, impl, s)) << impl << " " << text_of(s);
      }
      for (const int32_t save : {DELTIC_SAVE_STATES, DELTIC_SAVE_ALL}) {
        deltic_memory_plan plan;
        deltic_memory_plan_init(&plan, sizeof plan);
        expect_answered(deltic_backward_memory(&o, &b, save, nullptr, &plan), impl, s);
      }
    });
  }
}

constexpr deltic_op kBlocks[] = {DELTIC_CUMSUM, DELTIC_GATE,           DELTIC_L2NORM,
                                 DELTIC_KKT,    DELTIC_SCORES,         DELTIC_INVERSE,
                                 DELTIC_WY,     DELTIC_SCORES_INVERSE, DELTIC_RMSNORM};

// Inputs of a block; `outputs` too.
deltic_block_tensors block_of(deltic_op op, const Sizes& s, bool outputs) {
  deltic_block_tensors t;
  deltic_block_tensors_init(&t, sizeof t);
  const deltic_tensor square = view({s.B, s.T, s.HV, 64}), keys = view({s.B, s.T, s.H, s.K});
  if (s.N >= 0) t.cu_seqlens = view({s.N + 1}, DELTIC_I64);
  if (op == DELTIC_CUMSUM || op == DELTIC_GATE) {
    t.g = view({s.B, s.T, s.HV, s.V});  // any number of channels here
    t.A_log = view({s.HV});
    if (outputs) t.out = t.g;
    return t;
  }
  if (op == DELTIC_L2NORM || op == DELTIC_RMSNORM) {
    t.x = view({s.B, s.T, s.HV, s.V});
    if (op == DELTIC_RMSNORM) t.z = t.x, t.weight = view({s.V});
    if (outputs) t.out = t.x;
    return t;
  }
  if (op != DELTIC_INVERSE) t.k = keys, t.g = view({s.B, s.T, s.HV});
  if (op == DELTIC_SCORES || op == DELTIC_SCORES_INVERSE) t.q = keys;
  if (op == DELTIC_INVERSE || op == DELTIC_WY || op == DELTIC_SCORES_INVERSE) t.a = square;
  if (op == DELTIC_WY) {
    t.v = view({s.B, s.T, s.HV, s.V});
    if (outputs) t.u = t.v, t.w = view({s.B, s.T, s.HV, s.K});
  } else if (outputs) {
    t.out = square;
  }
  return t;
}

TEST(Sizes, BlockQueriesAnswerOrRefuse) {
  const Deadline deadline;
  for (const deltic_op op : kBlocks) {
    for (const char* impl : names(op)) {
      for_each_sizes(DELTIC_F32, [&](const Sizes& s) {
        if (s.slots >= 0 || s.M >= 0) return;
        deltic_options o = options_of(s, impl);
        if (op == DELTIC_CUMSUM || op == DELTIC_GATE) o.gate_form = DELTIC_GATE_SOFTPLUS;
        uint64_t bytes = 0;
        const deltic_block_tensors t = block_of(op, s, true);
        expect_answered(deltic_block_workspace(op, &o, &t, nullptr, &bytes), impl, s);
        if (op == DELTIC_SCORES_INVERSE) return;
        deltic_block_backward_tensors b;
        deltic_block_backward_tensors_init(&b, sizeof b);
        const deltic_block_tensors f = block_of(op, s, false);
        b.forward = &f;
        if (op == DELTIC_WY) {
          b.d_u = b.dv = t.u, b.d_w = t.w;
        } else {
          b.d_out = t.out;
        }
        b.dA_log = f.A_log;
        expect_answered(deltic_block_backward_workspace(op, &o, &b, nullptr, &bytes), impl, s);
      });
    }
  }
}

TEST(Sizes, ConvQueriesAnswerOrRefuse) {
  const Deadline deadline;
  for (const char* impl : names(DELTIC_CONV)) {
    for_each_sizes(DELTIC_F32, [&](const Sizes& s) {
      if (s.M >= 0) return;
      const deltic_options o = options_of(s, impl);
      deltic_conv_tensors t;
      deltic_conv_tensors_init(&t, sizeof t);
      t.x = t.out = view({s.B, s.T, s.HV});
      t.weight = view({s.HV, 4});
      if (s.N >= 0) t.cu_seqlens = view({s.N + 1}, DELTIC_I64);
      if (s.slots >= 0) {
        t.state_pool = view({s.slots, s.HV, s.V});
        t.read_index = view({s.sequences()}, DELTIC_I32);
      } else if (s.V > 1) {
        t.initial_state = t.final_state = view({s.sequences(), s.HV, s.V});
      }
      uint64_t bytes = 0;
      expect_answered(deltic_conv_workspace(&o, &t, nullptr, &bytes), impl, s);
      if (s.slots >= 0) return;
      deltic_conv_backward_tensors b;
      deltic_conv_backward_tensors_init(&b, sizeof b);
      b.forward = &t;
      const deltic_tensor initial = t.initial_state;
      t.out = t.final_state = deltic_tensor{};
      b.d_out = b.dx = t.x;
      b.d_final_state = b.d_initial_state = initial;
      b.dweight = t.weight;
      const deltic_status status = deltic_conv_backward_workspace(&o, &b, nullptr, &bytes);
      expect_answered(status, impl, s);
      const Wide blocks = Wide(s.B) * Wide(s.T) / 256;
      const bool has_sums = status == DELTIC_OK && impl != std::string("cpu.plain") &&
                            impl != std::string("reference");
      if (has_sums) {
        EXPECT_GE(Wide(bytes), blocks * 5 * Wide(s.HV) * 4) << impl << " " << text_of(s);
      }
    });
  }
}

// ---- One limit --------------------------------------------------------------------------------

TEST(Sizes, LimitIsTheOneInTheText) {
  Sizes s{.T = 0};
  const deltic_options o = options_of(s, nullptr);
  uint64_t bytes = 0;
  s.V = power(56);
  deltic_tensors t = tensors_of(s);
  EXPECT_EQ(deltic_decode_workspace(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
  s.V = power(56) + 1;
  t = tensors_of(s);
  EXPECT_EQ(deltic_decode_workspace(&o, &t, nullptr, &bytes), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "decode: v: expected at most 2^56 elements (a size of 0 counts as 1), got shape "
               "[1, 0, 1, 72057594037927937]");
  t = tensors_of({});
  t.q.shape[1] = 2, t.q.strides[1] = power(56);
  EXPECT_EQ(deltic_decode_workspace(&o, &t, nullptr, &bytes), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "decode: q: expected a span of at most 2^56 elements, got strides "
               "[0, 72057594037927936, 0, 1] for shape [1, 2, 1, 1]");
}

TEST(Sizes, SizesOfDifferentTensorsHaveTheSameLimit) {
  const Sizes s{.HV = power(30), .N = power(30)};
  const deltic_options o = options_of(s, nullptr);
  uint64_t bytes = 0;
  const deltic_tensors t = tensors_of(s);
  EXPECT_EQ(deltic_forward_workspace(&o, &t, nullptr, &bytes), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "forward: tensors: expected at most 2^56 numbers N*HV*K*V, got "
               "[1073741824, 1073741824, 1, 1]");
}

TEST(Sizes, WorkspaceBeyondAllAddressesIsRefused) {
  const Sizes s{.V = power(48), .num_threads = 4096, .K = 256};
  const deltic_options o = options_of(s, nullptr);
  uint64_t bytes = 0;
  const deltic_tensors t = tensors_of(s);
  EXPECT_EQ(deltic_forward_workspace(&o, &t, nullptr, &bytes), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "forward: workspace: expected sizes that need less than 2^63 bytes, got B = 1, "
               "T = 1, N = 1, H = 1, HV = 1, K = 256, V = 281474976710656 and 4096 threads");
}

TEST(Sizes, SavedBeyondAllAddressesIsRefused) {
  const Sizes s{.T = power(56)};  // states of one number, kept as 16 rows of 32
  deltic_options o = options_of(s, nullptr);
  o.save = DELTIC_SAVE_ALL, o.chunk = 16;
  uint64_t bytes = 0;
  const deltic_tensors t = tensors_of(s);
  EXPECT_EQ(deltic_forward_saved(&o, &t, &bytes), DELTIC_INVALID_ARGUMENT);
  EXPECT_NE(std::string(deltic_last_error()).find("forward: saved: expected sizes that need less"),
            std::string::npos)
      << deltic_last_error();
}

// ---- Nothing to do ----------------------------------------------------------------------------

class EmptyCall : public testing::TestWithParam<deltic_op> {};

TEST_P(EmptyCall, ManyEmptySequences) {
  const Deadline deadline;
  const deltic_op op = GetParam();
  const auto run = op == DELTIC_FORWARD ? deltic_forward : deltic_decode;
  const auto query = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
  for (const char* impl : names(op)) {
    for (Sizes s : {Sizes{.B = power(40), .T = 0}, Sizes{.T = 0, .V = power(50)},
                    Sizes{.T = 0, .HV = power(50)}, Sizes{.B = 0, .HV = power(50)}}) {
      s.dtype = dtype_for(impl);
      for (const int32_t checked : {1, 2}) {
        SCOPED_TRACE(impl + (" " + text_of(s)));
        deltic_options o = options_of(s, impl);
        o.checked = checked;
        deltic_tensors t = tensors_of(s);
        uint64_t bytes = 1;
        ASSERT_EQ(query(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
        EXPECT_EQ(bytes, 0u);
        EXPECT_EQ(run(&o, &t, nullptr, nullptr), DELTIC_OK) << deltic_last_error();
        // A state that nobody asks for does not make it work.
        float x = 0;
        t.initial_state = view_of(&x, {s.B, s.HV, s.K, s.V});
        if (s.V == 1) {
          EXPECT_EQ(run(&o, &t, nullptr, nullptr), DELTIC_OK) << deltic_last_error();
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ops, EmptyCall, testing::Values(DELTIC_FORWARD, DELTIC_DECODE),
                         [](const auto& row) { return deltic_op_name(row.param); });

// What forward leaves of a call without tokens is a header, however many sequences or heads there
// are.
void expect_header_alone(const Sizes& s, const char* impl) {
  SCOPED_TRACE(impl + (" " + text_of(s)));
  deltic_options o = options_of(s, impl);
  deltic_tensors t = tensors_of(s);
  int64_t ends[4] = {};
  if (s.N >= 0) t.cu_seqlens.data = ends;
  o.save = DELTIC_SAVE_STATES;
  uint64_t bytes = 0, saved_bytes = 0;
  ASSERT_EQ(deltic_forward_workspace(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
  ASSERT_LT(bytes, uint64_t{1} << 24);
  ASSERT_EQ(deltic_forward_saved(&o, &t, &saved_bytes), DELTIC_OK) << deltic_last_error();
  Scratch workspace(bytes), saved(saved_bytes);
  t.saved = saved.c();
  const deltic_workspace w = workspace.c();
  ASSERT_EQ(deltic_forward(&o, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();

  // Backward finds it to be of this call.
  deltic_backward_tensors b;
  deltic_backward_tensors_init(&b, sizeof b);
  deltic_tensors f = t;
  b.forward = &f;
  f.o = deltic_tensor{};
  o.save = DELTIC_SAVE_NONE;
  ASSERT_EQ(deltic_backward_workspace(&o, &b, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
  Scratch again(bytes);
  const deltic_workspace w2 = again.c();
  EXPECT_EQ(deltic_backward(&o, &b, &w2, nullptr), DELTIC_OK) << deltic_last_error();
  if (s.N >= 0) {
    f.cu_seqlens.shape[0] = 2;
  } else {
    f.q.shape[0] = f.k.shape[0] = f.v.shape[0] = f.g.shape[0] = 7;
  }
  EXPECT_EQ(deltic_backward(&o, &b, &w2, nullptr), DELTIC_INVALID_ARGUMENT);
}

TEST(NothingToDo, SavedOfManyEmptySequences) {
  const Deadline deadline;
  for (const char* impl : names(DELTIC_FORWARD)) {
    if (impl == std::string("reference")) continue;
    expect_header_alone({.B = power(40), .T = 0, .dtype = dtype_for(impl)}, impl);
    expect_header_alone({.T = 0, .HV = power(40), .N = 3, .dtype = dtype_for(impl)}, impl);
  }
}

TEST(NothingToDo, Gradients) {
  const Deadline deadline;
  float x = 0, gradient = 1;
  for (const char* impl : names(DELTIC_BACKWARD)) {
    SCOPED_TRACE(impl);
    // Nothing asked for, of 2^60 tokens.
    Sizes s{.B = power(20), .T = power(30), .dtype = dtype_for(impl)};
    deltic_options o = options_of(s, impl);
    deltic_backward_tensors b;
    deltic_backward_tensors_init(&b, sizeof b);
    deltic_tensors f = inputs_of(s);
    b.forward = &f;
    for (deltic_tensor* in : {&f.q, &f.k, &f.v, &f.g}) in->data = &x;
    uint64_t bytes = 1;
    EXPECT_EQ(deltic_backward_workspace(&o, &b, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
    EXPECT_EQ(bytes, 0u);
    EXPECT_EQ(deltic_backward(&o, &b, nullptr, nullptr), DELTIC_OK) << deltic_last_error();
    // The gradient of a parameter without tokens is 0.
    s = {.B = power(40), .T = 0, .dtype = dtype_for(impl)};
    o.gate_form = DELTIC_GATE_SOFTPLUS;
    f = inputs_of(s);
    f.A_log = view_of(&x, {1}), b.dA_log = view_of(&gradient, {1});
    gradient = 1;
    ASSERT_EQ(deltic_backward_workspace(&o, &b, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
    ASSERT_LT(bytes, uint64_t{1} << 24);
    Scratch workspace(bytes);
    const deltic_workspace w = workspace.c();
    EXPECT_EQ(deltic_backward(&o, &b, &w, nullptr), DELTIC_OK) << deltic_last_error();
    EXPECT_EQ(gradient, 0.0f);
  }
}

TEST(NothingToDo, BlocksAndTheirGradients) {
  const Deadline deadline;
  for (const deltic_op op : kBlocks) {
    for (const char* impl : names(op)) {
      for (const Sizes& s : {Sizes{.B = power(40), .T = 0}, Sizes{.T = 0, .HV = power(48)}}) {
        SCOPED_TRACE(deltic_op_name(op) + (" " + std::string(impl) + " ") + text_of(s));
        deltic_options o = options_of(s, impl);
        const deltic_block_tensors t = block_of(op, s, true);
        if (t.A_log.rank > 0) o.gate_form = DELTIC_GATE_SOFTPLUS;
        uint64_t bytes = 1;
        float x = 0;
        deltic_block_tensors call = t;
        if (call.A_log.rank > 0) call.A_log.data = &x, call.A_log.shape[0] = s.HV;
        if (call.weight.rank > 0) call.weight.data = &x;
        ASSERT_EQ(deltic_block_workspace(op, &o, &call, nullptr, &bytes), DELTIC_OK)
            << deltic_last_error();
        EXPECT_EQ(bytes, 0u);
        if (s.HV == 1) {
          EXPECT_EQ(deltic_block(op, &o, &call, nullptr, nullptr), DELTIC_OK)
              << deltic_last_error();
        }
        if (op == DELTIC_SCORES_INVERSE) continue;
        deltic_block_backward_tensors b;
        deltic_block_backward_tensors_init(&b, sizeof b);
        deltic_block_tensors f = block_of(op, s, false);
        b.forward = &f;
        f.A_log = call.A_log, f.weight = call.weight;
        if (op == DELTIC_WY) b.d_w = t.w;
        if (op != DELTIC_WY) b.d_out = t.out;
        EXPECT_EQ(deltic_block_backward_workspace(op, &o, &b, nullptr, &bytes), DELTIC_OK)
            << deltic_last_error();
        EXPECT_EQ(bytes, 0u);
        if (s.HV == 1) {
          EXPECT_EQ(deltic_block_backward(op, &o, &b, nullptr, nullptr), DELTIC_OK)
              << deltic_last_error();
        }
      }
    }
  }
}

TEST(NothingToDo, Conv) {
  const Deadline deadline;
  float x = 0;
  for (const char* impl : names(DELTIC_CONV)) {
    for (const Sizes& s : {Sizes{.B = power(40), .T = 0}, Sizes{.T = 0, .HV = power(50)}}) {
      SCOPED_TRACE(impl + (" " + text_of(s)));
      const deltic_options o = options_of(s, impl);
      deltic_conv_tensors t;
      deltic_conv_tensors_init(&t, sizeof t);
      t.x = t.out = view({s.B, s.T, s.HV});
      t.weight = view_of(&x, {s.HV, 4});
      t.weight.strides[1] = 0;
      uint64_t bytes = 1;
      ASSERT_EQ(deltic_conv_workspace(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
      EXPECT_EQ(bytes, 0u);
      EXPECT_EQ(deltic_conv(&o, &t, nullptr, nullptr), DELTIC_OK) << deltic_last_error();
      deltic_conv_backward_tensors b;
      deltic_conv_backward_tensors_init(&b, sizeof b);
      b.forward = &t;
      t.out = deltic_tensor{};
      EXPECT_EQ(deltic_conv_backward(&o, &b, nullptr, nullptr), DELTIC_OK) << deltic_last_error();
    }
  }
}

// ---- Lists that name no slot ------------------------------------------------------------------

// Runs a call in the workspace that its query asks for.
template <class Tensors>
void expect_runs(deltic_status (*query)(const deltic_options*, const Tensors*, void*, uint64_t*),
                 deltic_status (*run)(const deltic_options*, const Tensors*,
                                      const deltic_workspace*, void*),
                 const deltic_options& o, const Tensors& t) {
  uint64_t bytes = 0;
  ASSERT_EQ(query(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
  ASSERT_LT(bytes, uint64_t{1} << 24);
  Scratch workspace(bytes);
  const deltic_workspace w = workspace.c();
  EXPECT_EQ(run(&o, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();
}

deltic_tensor list_of(int32_t* numbers, int64_t count) {
  deltic_tensor t = view({count}, DELTIC_I32);
  t.data = numbers;
  return t;
}

// No tokens, and slots or checkpoints that are none: of 2^36 heads nobody writes a state.
TEST_P(EmptyCall, NoSlotOfManyHeads) {
  const Deadline deadline;
  const deltic_op op = GetParam();
  const auto run = op == DELTIC_FORWARD ? deltic_forward : deltic_decode;
  const auto query = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
  int32_t none[] = {-1, -1, -1}, empty[] = {0, 0, 0, 0}, counts[] = {0, 1, 2, 2};
  for (const char* impl : names(op)) {
    for (Sizes s :
         {Sizes{.B = 3, .T = 0, .HV = power(36)}, Sizes{.T = 0, .HV = power(36), .N = 3}}) {
      SCOPED_TRACE(impl + (" " + text_of(s)));
      s.dtype = dtype_for(impl);
      deltic_options o = options_of(s, impl);
      for (const int32_t checked : {1, 2}) {
        o.checked = checked;
        deltic_tensors t = tensors_of(s);
        if (s.N >= 0) t.cu_seqlens = list_of(empty, 4);
        const deltic_tensors without = t;
        t.state_pool = view({0, s.HV, s.K, s.V});
        t.read_index = list_of(none, 3);
        expect_runs(query, run, o, t);
        t.write_index = list_of(none, 3);
        expect_runs(query, run, o, t);
        t.write_pool = t.state_pool;
        expect_runs(query, run, o, t);
        t = without;
        t.ckpt_cu = list_of(counts, 4);
        t.ckpt_tokens = list_of(empty, 2), t.ckpt_slots = list_of(none, 2);
        t.ckpt_states = view({0, s.HV, s.K, s.V});
        if (op == DELTIC_FORWARD) expect_runs(query, run, o, t);
      }
    }
  }
}

// A call without tokens brings states to their slots all the same.
TEST_P(EmptyCall, StatesGoToTheirSlots) {
  const deltic_op op = GetParam();
  const auto run = op == DELTIC_FORWARD ? deltic_forward : deltic_decode;
  const auto query = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
  for (const char* impl : names(op)) {
    SCOPED_TRACE(impl);
    const Sizes s{.B = 3, .T = 0, .HV = 2, .dtype = dtype_for(impl)};
    float pool[] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t read[] = {-1, 0, -1}, write[] = {-1, 2, 3};
    deltic_tensors t = tensors_of(s);
    t.state_pool = view_of(pool, {4, 2, 1, 1});
    t.state_pool.strides[0] = 2, t.state_pool.strides[1] = t.state_pool.strides[2] = 1;
    t.read_index = list_of(read, 3), t.write_index = list_of(write, 3);
    expect_runs(query, run, options_of(s, impl), t);
    EXPECT_EQ(std::vector<float>(pool, pool + 8), (std::vector<float>{1, 2, 3, 4, 1, 2, 0, 0}));
  }
}

TEST(NothingToDo, NoSlotOfManyLayers) {
  const Deadline deadline;
  int32_t none[] = {-1, -1}, accepted[] = {1, 1};
  float x = 0;
  for (const auto& [layers, heads] : {std::pair(power(40), power(0)), {power(0), power(40)}}) {
    for (const char* impl : names(DELTIC_MOVE)) {
      SCOPED_TRACE(impl);
      deltic_move_tensors t;
      deltic_move_tensors_init(&t, sizeof t);
      t.state_pool = view({layers, 0, heads, 1, 1});
      t.read_index = t.write_index = list_of(none, 2);
      expect_runs(deltic_move_workspace, deltic_move, options_of({}, impl), t);
    }
    for (const char* impl : names(DELTIC_COMMIT)) {
      SCOPED_TRACE(impl);
      deltic_commit_tensors t;
      deltic_commit_tensors_init(&t, sizeof t);
      t.state_pool = view({layers, 0, heads, 1, 1});
      t.record = view_of(&x, {layers, 2, 1, heads, 2});
      t.accepted = list_of(accepted, 2);
      t.read_index = t.write_index = list_of(none, 2);
      expect_runs(deltic_commit_workspace, deltic_commit, options_of({}, impl), t);
    }
  }
}

TEST(NothingToDo, NoSlotOfManyChannels) {
  const Deadline deadline;
  int32_t none[] = {-1, -1};
  float x = 0;
  for (const char* impl : names(DELTIC_CONV)) {
    SCOPED_TRACE(impl);
    deltic_conv_tensors t;
    deltic_conv_tensors_init(&t, sizeof t);
    t.x = t.out = view({2, 0, power(40)});
    t.weight = view_of(&x, {power(40), 1});
    t.state_pool = view({0, power(40), 1});
    t.read_index = list_of(none, 2);
    expect_runs(deltic_conv_workspace, deltic_conv, options_of({}, impl), t);
  }
}

// ---- Strides and buffers ----------------------------------------------------------------------

// A stride means nothing where there is one element, whatever it is.
TEST(Strides, AnyWhereThereIsOneElement) {
  for (const deltic_op op : {DELTIC_FORWARD, DELTIC_DECODE}) {
    for (const char* impl : names(op)) {
      SCOPED_TRACE(impl);
      float q = 1, k = 1, v = 2, g = 0, o_value = 0, state = 3, after = 0;
      const Sizes s{.dtype = dtype_for(impl)};
      deltic_options o = options_of(s, impl);
      deltic_tensors t = tensors_of(s);
      t.q.data = &q, t.k.data = &k, t.v.data = &v, t.g.data = &g, t.o.data = &o_value;
      t.initial_state = view_of(&state, {1, 1, 1, 1}),
      t.final_state = view_of(&after, {1, 1, 1, 1});
      for (deltic_tensor* x : {&t.q, &t.k, &t.v, &t.g, &t.o, &t.initial_state, &t.final_state}) {
        std::fill_n(x->strides, x->rank, kHuge);
      }
      uint64_t bytes = 0;
      const auto query = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
      ASSERT_EQ(query(&o, &t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
      Scratch workspace(bytes);
      const deltic_workspace w = workspace.c();
      const auto run = op == DELTIC_FORWARD ? deltic_forward : deltic_decode;
      ASSERT_EQ(run(&o, &t, &w, nullptr), DELTIC_OK) << deltic_last_error();
      if (s.dtype == DELTIC_F32) {
        EXPECT_EQ(o_value, 2.0f);
      }
      t.o.data = &v;
      EXPECT_EQ(run(&o, &t, &w, nullptr), DELTIC_INVALID_ARGUMENT);
    }
  }
}

// The end of a buffer that lies behind all addresses is behind everything else too.
TEST(Buffers, SavedThatEndsBehindAllAddresses) {
  alignas(64) static std::byte memory[4096];
  float x[8] = {};
  deltic_backward_tensors b;
  deltic_backward_tensors_init(&b, sizeof b);
  const Sizes s;
  deltic_tensors f = inputs_of(s);
  b.forward = &f;
  f.q = f.k = f.v = view_of(x, {1, 1, 1, 1});
  f.g = view_of(x, {1, 1, 1});
  b.dq = view_of(x + 1, {1, 1, 1, 1});
  b.dq.data = memory + 128;
  f.saved = {memory, std::numeric_limits<uint64_t>::max()};
  const deltic_options o = options_of(s, nullptr);
  alignas(64) static std::byte workspace_memory[1 << 20];
  const deltic_workspace w{workspace_memory, sizeof workspace_memory};
  EXPECT_EQ(deltic_backward(&o, &b, &w, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "backward: saved: expected memory of its own, got an overlap with a tensor");
}

}  // namespace
}  // namespace deltic::test
