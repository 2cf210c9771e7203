// Every wrong call: its status, its text, and that nothing was written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <list>

#include "support.h"

namespace deltic::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

deltic_tensor none() { return deltic_tensor{}; }

// Memory of one call, and what is needed to see whether a byte of it changed.
class Memory {
 public:
  Buffer& make(DType type, std::vector<int64_t> shape, std::vector<int64_t> strides = {}) {
    return buffers_.emplace_back(type, std::move(shape), std::move(strides));
  }
  Buffer& zeros(DType type, std::vector<int64_t> shape) {
    int64_t elements = 1;
    for (int64_t n : shape) elements *= n;
    Buffer& b = make(type, std::move(shape));
    for (int64_t i = 0; i < elements; ++i) b.set(i, 0);
    return b;
  }
  deltic_tensor list(std::vector<int64_t> values, DType type = DType::i64) {
    Buffer& b = make(type, {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) b.set_index(static_cast<int64_t>(i), values[i]);
    return b.view();
  }
  std::vector<std::vector<uint8_t>> bytes() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Buffer& b : buffers_) all.push_back(b.all_bytes());
    return all;
  }

 private:
  std::list<Buffer> buffers_;
};

// A sound call of forward or decode: B = 1, T = 8, H = 2, HV = 4, K = V = 16, fp32, everything
// zero.
struct World {
  Memory memory;
  deltic_options options;
  deltic_tensors t;
  const deltic_options* options_pointer = &options;
  const deltic_tensors* tensors_pointer = &t;
  alignas(64) uint8_t scratch[1 << 20];
  deltic_workspace workspace{scratch, sizeof scratch};
  const deltic_workspace* workspace_pointer = &workspace;

  World() {
    deltic_options_init(&options, sizeof options);
    deltic_tensors_init(&t, sizeof t);
    t.q = memory.zeros(DType::f32, {1, 8, 2, 16}).view();
    t.k = memory.zeros(DType::f32, {1, 8, 2, 16}).view();
    t.v = memory.zeros(DType::f32, {1, 8, 4, 16}).view();
    t.o = memory.make(DType::f32, {1, 8, 4, 16}).view();
    t.beta = memory.zeros(DType::f32, {1, 8, 4}).view();
    t.g = memory.zeros(DType::f32, {1, 8, 4}).view();
    std::memset(scratch, 0xFF, sizeof scratch);
  }
  World(const World&) = delete;

  void states(int64_t slots) {
    t.initial_state = memory.zeros(DType::f32, {slots, 4, 16, 16}).view();
    t.final_state = memory.make(DType::f32, {slots, 4, 16, 16}).view();
  }
  void pack(std::vector<int64_t> offsets, DType type = DType::i64) {
    t.cu_seqlens = memory.list(std::move(offsets), type);
  }
  void pool(int64_t slots) { t.state_pool = memory.zeros(DType::f32, {slots, 4, 16, 16}).view(); }
  void checkpoints(std::vector<int64_t> cu, std::vector<int64_t> tokens, std::vector<int64_t> slots,
                   int64_t num_slots) {
    t.ckpt_cu = memory.list(std::move(cu));
    t.ckpt_tokens = memory.list(std::move(tokens));
    t.ckpt_slots = memory.list(std::move(slots));
    t.ckpt_states = memory.make(DType::f32, {num_slots, 4, 16, 16}).view();
  }
  void softplus() {
    options.gate_form = DELTIC_GATE_SOFTPLUS;
    t.A_log = memory.zeros(DType::f32, {4}).view();
  }
  // g of shape [B,T,HV,K].
  void channel_gate() { t.g = memory.zeros(DType::f32, {1, 8, 4, 16}).view(); }

  deltic_status call(deltic_op op) const {
    const auto fn = op == DELTIC_FORWARD ? deltic_forward : deltic_decode;
    return fn(options_pointer, tensors_pointer, workspace_pointer, nullptr);
  }
  deltic_status query(deltic_op op) const {
    uint64_t bytes = 0;
    const auto fn = op == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
    return fn(options_pointer, tensors_pointer, nullptr, &bytes);
  }
};

// A sound call of backward, with an initial state and every gradient, made from forward's.
struct BackwardWorld : World {
  deltic_tensors inputs;  // b.forward points here
  deltic_backward_tensors b;
  const deltic_backward_tensors* backward_pointer = &b;

  BackwardWorld() {
    deltic_backward_tensors_init(&b, sizeof b);
    states(1);
    softplus();
    inputs = t;
    inputs.o = inputs.final_state = none();
    b.forward = &inputs;
    const auto like = [&](const deltic_tensor& of) {
      return memory.make(DType::f32, std::vector<int64_t>(of.shape, of.shape + of.rank)).view();
    };
    b.d_o = memory.zeros(DType::f32, {1, 8, 4, 16}).view();
    b.d_final_state = memory.zeros(DType::f32, {1, 4, 16, 16}).view();
    b.dq = like(t.q), b.dk = like(t.k), b.dv = like(t.v), b.dbeta = like(t.beta), b.dg = like(t.g);
    b.dA_log = like(t.A_log), b.d_initial_state = like(t.initial_state);
  }
  deltic_status call(deltic_op) const {
    return deltic_backward(options_pointer, backward_pointer, workspace_pointer, nullptr);
  }
  deltic_status query(deltic_op) const {
    uint64_t bytes = 0;
    return deltic_backward_workspace(options_pointer, backward_pointer, nullptr, &bytes);
  }
};

// A sound call of each building block: chunk 16, otherwise as above.
struct BlockWorld {
  Memory memory;
  deltic_options options;
  deltic_block_tensors t;
  const deltic_options* options_pointer = &options;
  const deltic_block_tensors* tensors_pointer = &t;
  alignas(64) uint8_t scratch[1 << 20];
  deltic_workspace workspace{scratch, sizeof scratch};
  const deltic_workspace* workspace_pointer = &workspace;

  explicit BlockWorld(deltic_op op) {
    deltic_options_init(&options, sizeof options);
    options.chunk = 16;
    deltic_block_tensors_init(&t, sizeof t);
    const deltic_tensor key = memory.zeros(DType::f32, {1, 8, 2, 16}).view();
    switch (op) {
      case DELTIC_CUMSUM:
      case DELTIC_GATE:
        t.g = memory.zeros(DType::f32, {1, 8, 4}).view();
        t.out = memory.make(DType::f32, {1, 8, 4}).view();
        break;
      case DELTIC_L2NORM:
        t.x = key;
        t.out = memory.make(DType::f32, {1, 8, 2, 16}).view();
        break;
      case DELTIC_SCORES_INVERSE:
        t.a = memory.make(DType::f32, {1, 8, 4, 16}).view();
        [[fallthrough]];
      case DELTIC_SCORES:
        t.q = memory.zeros(DType::f32, {1, 8, 2, 16}).view();
        [[fallthrough]];
      case DELTIC_KKT:
        t.k = key;
        t.out = memory.make(DType::f32, {1, 8, 4, 16}).view();
        break;
      case DELTIC_INVERSE:
        t.a = memory.zeros(DType::f32, {1, 8, 4, 16}).view();
        t.out = memory.make(DType::f32, {1, 8, 4, 16}).view();
        break;
      default:
        t.k = key;
        t.a = memory.zeros(DType::f32, {1, 8, 4, 16}).view();
        t.w = memory.make(DType::f32, {1, 8, 4, 16}).view();
        break;
    }
    std::memset(scratch, 0xFF, sizeof scratch);
  }
  BlockWorld(const BlockWorld&) = delete;

  deltic_status call(deltic_op op) const {
    return deltic_block(op, options_pointer, tensors_pointer, workspace_pointer, nullptr);
  }
  deltic_status query(deltic_op op) const {
    uint64_t bytes = 0;
    return deltic_block_workspace(op, options_pointer, tensors_pointer, nullptr, &bytes);
  }
};

// A sound call of each building block's gradient, made from the block's.
struct GradientWorld : BlockWorld {
  deltic_block_tensors inputs;  // b.forward points here
  deltic_block_backward_tensors b;
  const deltic_block_backward_tensors* backward_pointer = &b;

  explicit GradientWorld(deltic_op op) : BlockWorld(op) {
    deltic_block_backward_tensors_init(&b, sizeof b);
    const auto like = [&](const deltic_tensor& of, bool zeros) {
      const std::vector<int64_t> shape(of.shape, of.shape + of.rank);
      return of.rank == 0 ? none()
             : zeros      ? memory.zeros(DType::f32, shape).view()
                          : memory.make(DType::f32, shape).view();
    };
    b.d_out = like(t.out, true), b.d_w = like(t.w, true);
    t.out = t.w = none();
    inputs = t;
    b.forward = &inputs;
    b.dq = like(t.q, false), b.dk = like(t.k, false), b.dx = like(t.x, false);
    b.dg = like(t.g, false), b.da = like(t.a, false);
  }
  deltic_status call(deltic_op op) const {
    return deltic_block_backward(op, options_pointer, backward_pointer, workspace_pointer, nullptr);
  }
  deltic_status query(deltic_op op) const {
    uint64_t bytes = 0;
    return deltic_block_backward_workspace(op, options_pointer, backward_pointer, nullptr, &bytes);
  }
};

// Runs a spoiled call and compares status, text and memory.
template <class AnyWorld>
void expect_error(AnyWorld& w, deltic_op op, deltic_status status, const std::string& text) {
  const auto before = w.memory.bytes();
  EXPECT_EQ(w.call(op), status);
  EXPECT_EQ(std::string(deltic_last_error()), text);
  EXPECT_TRUE(w.memory.bytes() == before) << "a failed call wrote into a tensor";
  // The query sees shapes, dtypes and options; whatever it sees it says in the same words.
  if (w.query(op) != DELTIC_OK) {
    EXPECT_EQ(std::string(deltic_last_error()), text);
  }
}

struct Wrong {
  const char* name;
  deltic_op op;
  std::function<void(World&)> spoil;
  std::string text;  // behind `op: `
  deltic_status status = DELTIC_INVALID_ARGUMENT;
};
void PrintTo(const Wrong& wrong, std::ostream* out) { *out << wrong.name; }

class CallError : public testing::TestWithParam<Wrong> {};

TEST_P(CallError, NamesArgumentExpectedAndGot) {
  const Wrong& wrong = GetParam();
  const auto w = std::make_unique<World>();
  ASSERT_EQ(w->call(wrong.op), DELTIC_OK) << deltic_last_error();  // sound until spoiled
  std::memset(w->t.o.data, 0xFF, 8 * 4 * 16 * sizeof(float));
  wrong.spoil(*w);
  expect_error(*w, wrong.op, wrong.status,
               std::string(deltic_op_name(wrong.op)) + ": " + wrong.text);
}

constexpr deltic_op F = DELTIC_FORWARD, D = DELTIC_DECODE;

void set_shape(deltic_tensor& t, std::initializer_list<int64_t> shape) {
  t = TensorView(t.data, static_cast<DType>(t.dtype), shape);
}

// A struct smaller than the first version of this ABI.
std::string too_small(const std::string& argument, int first, int got, const std::string& name) {
  return argument + ".size: expected at least " + std::to_string(first) + ", got " +
         std::to_string(got) + " (sizeof the struct: see deltic_" + name + "_init)";
}

const Wrong kTensorErrors[] = {
    {"null_tensors", F, [](World& w) { w.tensors_pointer = nullptr; },
     "tensors: expected a struct, got a null pointer"},
    {"tensors_size_zero", F, [](World& w) { w.t.size = 0; },
     too_small("tensors", 2424, 0, "tensors")},
    {"options_size_small", D, [](World& w) { w.options.size = 80; },
     too_small("options", 88, 80, "options")},
    {"tensors_size_large", F, [](World& w) { w.t.size = sizeof(deltic_tensors) + 4097; },
     "tensors.size: expected at most " + std::to_string(sizeof(deltic_tensors) + 4096) + ", got " +
         std::to_string(sizeof(deltic_tensors) + 4097) +
         " (sizeof the struct: see deltic_tensors_init)"},
    {"options_reserved", F, [](World& w) { w.options.reserved = 1; },
     "reserved: expected 0, got 1"},
    {"options_reserved1", F, [](World& w) { w.options.reserved1 = -1; },
     "reserved1: expected 0, got -1"},
    {"form_unknown", F, [](World& w) { w.options.form = 2; },
     "form: expected chunked (0) or recurrent (1), got 2"},
    {"form_of_decode", D, [](World& w) { w.options.form = DELTIC_FORM_RECURRENT; },
     "form: expected chunked (forward alone has two forms), got recurrent"},
    {"form_and_save", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.options.save = DELTIC_SAVE_ALL;
     },
     "save: expected none with the form recurrent (backward finds the states again), got all"},
    {"form_implementation", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.options.impl = "cpu.amx";
     },
     "impl: cpu.amx was named and does not take this call: it has the chunked form alone",
     DELTIC_UNSUPPORTED},
    {"recurrent_from_chunked", F, [](World& w) { w.t.recurrent_from = w.memory.list({1}); },
     "recurrent_from: expected none without the form recurrent, got a tensor"},
    {"recurrent_from_of_decode", D, [](World& w) { w.t.recurrent_from = w.memory.list({1}); },
     "recurrent_from: expected none (decode is recurrent from its first token on), got a tensor"},
    {"recurrent_from_shape", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.t.recurrent_from = w.memory.list({1, 2});
     },
     "recurrent_from: expected shape [1], got [2]"},
    {"recurrent_from_dtype", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.t.recurrent_from = w.memory.zeros(DType::f32, {1}).view();
     },
     "recurrent_from: expected int32 or int64, got fp32"},
    {"recurrent_from_late", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.t.recurrent_from = w.memory.list({9});
     },
     "recurrent_from: expected 0 to 8, the length of sequence 0, got 9 at 0"},
    {"recurrent_from_negative", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.pack({0, 5, 8});
       w.t.recurrent_from = w.memory.list({5, -1}, DType::i32);
     },
     "recurrent_from: expected 0 to 3, the length of sequence 1, got -1 at 1"},
    {"recurrent_from_over_output", F,
     [](World& w) {
       w.options.form = DELTIC_FORM_RECURRENT;
       w.t.recurrent_from = w.memory.list({1}, DType::i32);
       w.t.recurrent_from.data = w.t.o.data;  // the list is the smaller one: nothing else is hit
     },
     "o: expected memory of its own, got an overlap with recurrent_from"},
    {"no_q", F, [](World& w) { w.t.q = none(); }, "q: expected a tensor, got none"},
    {"no_k", F, [](World& w) { w.t.k = none(); }, "k: expected a tensor, got none"},
    {"no_v", D, [](World& w) { w.t.v = none(); }, "v: expected a tensor, got none"},
    {"no_o", F, [](World& w) { w.t.o = none(); }, "o: expected a tensor, got none"},
    {"q_null_data", F, [](World& w) { w.t.q.data = nullptr; },
     "q: expected data, got a null pointer"},
    {"o_null_data", D, [](World& w) { w.t.o.data = nullptr; },
     "o: expected data, got a null pointer"},
    {"rank_negative", F, [](World& w) { w.t.q.rank = -1; }, "q: expected a rank of 0 to 6, got -1"},
    {"rank_seven", F, [](World& w) { w.t.g.rank = 7; }, "g: expected a rank of 0 to 6, got 7"},
    {"q_rank", F,
     [](World& w) {
       set_shape(w.t.q, {8, 2, 16});
     },
     "q: expected shape [B,T,H,K], got [8, 2, 16]"},
    {"v_rank", F,
     [](World& w) {
       set_shape(w.t.v, {8, 4, 16});
     },
     "v: expected shape [B,T,HV,V], got [8, 4, 16]"},
    {"negative_size", F, [](World& w) { w.t.q.shape[1] = -8; },
     "q: expected sizes of at least 0, got shape [1, -8, 2, 16]"},
    {"k_shape", F,
     [](World& w) {
       set_shape(w.t.k, {1, 8, 2, 8});
     },
     "k: expected shape [1, 8, 2, 16], got [1, 8, 2, 8]"},
    {"k_tokens", F,
     [](World& w) {
       set_shape(w.t.k, {1, 7, 2, 16});
     },
     "k: expected shape [1, 8, 2, 16], got [1, 7, 2, 16]"},
    {"v_tokens", F,
     [](World& w) {
       set_shape(w.t.v, {1, 7, 4, 16});
     },
     "v: expected shape [1, 8, 4, 16], got [1, 7, 4, 16]"},
    {"o_shape", F,
     [](World& w) {
       set_shape(w.t.o, {1, 8, 4, 8});
     },
     "o: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"head_divisibility", F,
     [](World& w) {
       set_shape(w.t.v, {1, 8, 3, 16});
     },
     "v: expected a number of value heads HV that is a multiple of H = 2, got 3"},
    {"no_value_heads", F,
     [](World& w) {
       set_shape(w.t.v, {1, 8, 0, 16});
     },
     "v: expected a number of value heads HV that is a multiple of H = 2, got 0"},
    {"value_width_zero", F,
     [](World& w) {
       set_shape(w.t.v, {1, 8, 4, 0});
     },
     "v: expected a value width V of at least 1, got 0"},
    {"no_heads", F,
     [](World& w) {
       set_shape(w.t.q, {1, 8, 0, 16});
     },
     "q: expected at least one head, got shape with H = 0"},
    {"key_width_zero", F,
     [](World& w) {
       set_shape(w.t.q, {1, 8, 2, 0});
     },
     "q: expected a key width K of 1 to 256, got 0"},
    {"key_width", F,
     [](World& w) {
       w.t.q = w.memory.zeros(DType::f32, {1, 8, 2, 257}).view();
       w.t.k = w.memory.zeros(DType::f32, {1, 8, 2, 257}).view();
     },
     "q: expected a key width K of 1 to 256, got 257"},
    {"too_many_elements", F,
     [](World& w) {
       w.t.q.shape[0] = int64_t{1} << 40;
       w.t.q.shape[1] = int64_t{1} << 40;
     },
     "q: expected at most 2^56 elements (a size of 0 counts as 1), got shape [1099511627776, "
     "1099511627776, 2, 16]"},
    {"span_too_wide", F,
     [](World& w) { w.t.q.strides[1] = std::numeric_limits<int64_t>::max() / 2; },
     "q: expected a span of at most 2^56 elements, got strides [256, 4611686018427387903, 16, 1] "
     "for "
     "shape [1, 8, 2, 16]"},
    {"beta_shape", F,
     [](World& w) {
       set_shape(w.t.beta, {1, 8, 2});
     },
     "beta: expected shape [1, 8, 4], got [1, 8, 2]"},
    {"beta_vector_in_forward", F,
     [](World& w) {
       w.t.beta = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "beta: expected shape [B,T,HV] (forward is chunked: decode takes a value-wise beta), got "
     "[1, 8, 4, 16]"},
    {"beta_vector_width", D,
     [](World& w) {
       w.t.beta = w.memory.zeros(DType::f32, {1, 8, 4, 8}).view();
     },
     "beta: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"g_rank", F,
     [](World& w) {
       set_shape(w.t.g, {8, 4});
     },
     "g: expected shape [B,T,HV] or [B,T,HV,K], got [8, 4]"},
    {"g_heads", F,
     [](World& w) {
       set_shape(w.t.g, {1, 8, 2});
     },
     "g: expected shape [1, 8, 4], got [1, 8, 2]"},
    {"g_channels", F,
     [](World& w) {
       w.t.g = w.memory.zeros(DType::f32, {1, 8, 4, 8}).view();
     },
     "g: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"gv_in_forward", F,
     [](World& w) {
       w.t.gv = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "gv: expected none (forward is chunked: decode takes a value-wise decay), got a tensor"},
    {"gv_shape", D,
     [](World& w) {
       w.t.gv = w.memory.zeros(DType::f32, {1, 8, 4, 8}).view();
     },
     "gv: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"initial_state_shape", F,
     [](World& w) {
       w.states(1);
       set_shape(w.t.initial_state, {1, 4, 16, 8});
     },
     "initial_state: expected shape [1, 4, 16, 16], got [1, 4, 16, 8]"},
    {"initial_state_layout", F,
     [](World& w) {
       w.t.v = w.memory.zeros(DType::f32, {1, 8, 4, 24}).view();
       w.t.o = w.memory.make(DType::f32, {1, 8, 4, 24}).view();
       w.t.initial_state = w.memory.zeros(DType::f32, {1, 4, 16, 24}).view();
       w.options.state_layout = DELTIC_STATE_VK;
     },
     "initial_state: expected shape [1, 4, 24, 16], got [1, 4, 16, 24]"},
    {"final_state_count", F,
     [](World& w) {
       w.states(1);
       w.pack({0, 3, 8});
       set_shape(w.t.initial_state, {1, 4, 16, 16});
     },
     "initial_state: expected shape [2, 4, 16, 16], got [1, 4, 16, 16]"},
    {"final_state_shape", D,
     [](World& w) {
       w.t.final_state = w.memory.make(DType::f32, {2, 4, 16, 16}).view();
     },
     "final_state: expected shape [1, 4, 16, 16], got [2, 4, 16, 16]"},
};
INSTANTIATE_TEST_SUITE_P(Tensors, CallError, testing::ValuesIn(kTensorErrors),
                         [](const auto& row) { return std::string(row.param.name); });

const Wrong kDtypeErrors[] = {
    {"q_integer", F, [](World& w) { w.t.q.dtype = DELTIC_I32; },
     "q: expected fp32, bf16 or fp16, got int32"},
    {"q_unknown", F, [](World& w) { w.t.q.dtype = 17; }, "q: expected a known dtype, got 17"},
    {"k_differs", F, [](World& w) { w.t.k.dtype = DELTIC_BF16; },
     "k: expected fp32 as q, got bf16"},
    {"v_differs", F, [](World& w) { w.t.v.dtype = DELTIC_F16; }, "v: expected fp32 as q, got fp16"},
    {"o_differs", D, [](World& w) { w.t.o.dtype = DELTIC_BF16; },
     "o: expected fp32 as q, got bf16"},
    {"f64_outside_the_oracle", F,
     [](World& w) {
       w.t.q = w.memory.zeros(DType::f64, {1, 8, 2, 16}).view();
     },
     "q: expected fp32, bf16 or fp16, got fp64 (taken by the implementation reference alone)"},
    {"g_f64", F,
     [](World& w) {
       w.t.g = w.memory.zeros(DType::f64, {1, 8, 4}).view();
     },
     "g: expected fp32, bf16 or fp16, got fp64 (taken by the implementation reference alone)"},
    {"g_integer", F, [](World& w) { w.t.g.dtype = DELTIC_I32; },
     "g: expected fp32, bf16 or fp16, got int32"},
    {"beta_integer", D, [](World& w) { w.t.beta.dtype = DELTIC_I32; },
     "beta: expected fp32, bf16 or fp16, got int32"},
    {"A_log_integer", F,
     [](World& w) {
       w.softplus();
       w.t.A_log.dtype = DELTIC_I32;
     },
     "A_log: expected fp32, bf16 or fp16, got int32"},
    {"state_i32", F,
     [](World& w) {
       w.states(1);
       w.t.initial_state.dtype = DELTIC_I32;
     },
     "initial_state: expected fp32, bf16 or fp16, got int32"},
    {"final_state_f64", D,
     [](World& w) {
       w.t.final_state = w.memory.make(DType::f64, {1, 4, 16, 16}).view();
     },
     "final_state: expected fp32, bf16 or fp16, got fp64"},
    {"pool_i64", D,
     [](World& w) {
       w.t.state_pool = w.memory.zeros(DType::i64, {2, 4, 16, 16}).view();
     },
     "state_pool: expected fp32, bf16 or fp16, got int64"},
    {"checkpoints_i32", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.t.ckpt_states.dtype = DELTIC_I32;
     },
     "ckpt_states: expected fp32, bf16 or fp16, got int32"},
    {"cu_seqlens_float", F,
     [](World& w) { w.t.cu_seqlens = w.memory.zeros(DType::f32, {2}).view(); },
     "cu_seqlens: expected int32 or int64, got fp32"},
    {"read_index_float", D,
     [](World& w) {
       w.pool(2);
       w.t.read_index = w.memory.zeros(DType::f32, {1}).view();
     },
     "read_index: expected int32 or int64, got fp32"},
};
INSTANTIATE_TEST_SUITE_P(Dtypes, CallError, testing::ValuesIn(kDtypeErrors),
                         [](const auto& row) { return std::string(row.param.name); });

const Wrong kMemoryErrors[] = {
    {"device_unknown", F, [](World& w) { w.t.q.device_type = 9; },
     "q: expected device cpu (0) or cuda (1), got 9"},
    {"devices_differ", F, [](World& w) { w.t.g.device_type = DELTIC_CUDA; },
     "g: expected device cpu:0 as q, got cuda:0"},
    {"device_index_differs", F, [](World& w) { w.t.k.device_index = 1; },
     "k: expected device cpu:0 as q, got cpu:1"},
    {"stride_negative", F, [](World& w) { w.t.q.strides[1] = -32; },
     "q: expected strides of at least 0, got [256, -32, 16, 1]"},
    {"stride_last", F,
     [](World& w) {
       w.t.v = w.memory.make(DType::f32, {1, 8, 4, 16}, {1024, 128, 32, 2}).view();
     },
     "v: expected stride 1 in the last dimension, got 2"},
    {"stride_last_zero", D, [](World& w) { w.t.g.strides[2] = 0; },
     "g: expected stride 1 in the last dimension, got 0"},
    {"stride_zero_in_output", F, [](World& w) { w.t.o.strides[2] = 0; },
     "o: expected strides that give every element a place of its own, got [512, 64, 0, 1] for "
     "shape [1, 8, 4, 16]"},
    {"stride_overlapping_output", F, [](World& w) { w.t.o.strides[2] = 15; },
     "o: expected strides that give every element a place of its own, got [512, 64, 15, 1] for "
     "shape [1, 8, 4, 16]"},
    {"stride_zero_in_state", D,
     [](World& w) {
       w.pack({0, 3, 8});
       w.t.final_state = w.memory.make(DType::f32, {2, 4, 16, 16}).view();
       w.t.final_state.strides[0] = 0;
     },
     "final_state: expected strides that give every element a place of its own, got [0, 256, 16, "
     "1] for shape [2, 4, 16, 16]"},
    {"stride_zero_in_pool", D,
     [](World& w) {
       w.pool(2);
       w.t.state_pool.strides[1] = 0;
     },
     "state_pool: expected strides that give every element a place of its own, got [1024, 0, 16, "
     "1] for shape [2, 4, 16, 16]"},
    {"o_is_v", F, [](World& w) { w.t.o.data = w.t.v.data; },
     "o: expected memory of its own, got an overlap with v"},
    {"o_overlaps_q", F,
     [](World& w) {
       w.t.q.data = static_cast<uint8_t*>(w.t.o.data) + 1024;
       set_shape(w.t.q, {1, 8, 2, 16});
     },
     "o: expected memory of its own, got an overlap with q"},
    {"o_overlaps_g", D, [](World& w) { w.t.g.data = w.t.o.data; },
     "o: expected memory of its own, got an overlap with g"},
    {"o_overlaps_beta_by_one_element", D,
     [](World& w) {
       w.t.beta.data = static_cast<uint8_t*>(w.t.o.data) + 4 * (8 * 64 - 1) - 4 * 31;
     },
     "o: expected memory of its own, got an overlap with beta"},
    {"interleaved_and_overlapping", F,
     [](World& w) {
       Buffer& fused = w.memory.zeros(DType::f32, {8, 127});
       w.t.v = TensorView(fused.data(), DType::f32, {1, 8, 4, 16}).with_strides({1016, 127, 16, 1});
       w.t.o = TensorView(fused.data() + 4 * 63, DType::f32, {1, 8, 4, 16})
                   .with_strides({1016, 127, 16, 1});
     },
     "o: expected memory of its own, got an overlap with v"},
    {"states_overlap_in_part", F,
     [](World& w) {
       Buffer& both = w.memory.zeros(DType::f32, {2, 4, 16, 16});
       w.t.initial_state = TensorView(both.data(), DType::f32, {1, 4, 16, 16});
       w.t.final_state = TensorView(both.data() + 64, DType::f32, {1, 4, 16, 16});
     },
     "final_state: expected memory of its own, got an overlap with initial_state"},
    {"states_in_place_with_other_strides", F,
     [](World& w) {
       w.pack({0, 3, 8});
       Buffer& both = w.memory.zeros(DType::f32, {4, 4, 16, 16});
       w.t.initial_state = TensorView(both.data(), DType::f32, {2, 4, 16, 16});
       w.t.final_state =
           TensorView(both.data(), DType::f32, {2, 4, 16, 16}).with_strides({2048, 256, 16, 1});
     },
     "final_state: expected memory of its own, got an overlap with initial_state"},
    {"states_in_place_with_other_dtype", D,
     [](World& w) {
       w.states(1);
       w.t.final_state.data = w.t.initial_state.data;
       w.t.final_state.dtype = DELTIC_BF16;
     },
     "final_state: expected memory of its own, got an overlap with initial_state"},
    {"checkpoints_overlap_initial_state", F,
     [](World& w) {
       w.states(1);
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.t.ckpt_states.data = w.t.initial_state.data;
     },
     "ckpt_states: expected memory of its own, got an overlap with initial_state"},
    {"checkpoints_overlap_state_in_place", F,
     [](World& w) {
       w.states(1);
       w.t.final_state.data = w.t.initial_state.data;
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.t.ckpt_states.data = w.t.initial_state.data;
     },
     "ckpt_states: expected memory of its own, got an overlap with final_state"},
    {"o_overlaps_state_in_place", D,
     [](World& w) {
       w.states(1);
       w.t.final_state = w.t.initial_state;
       w.t.o.data = w.t.initial_state.data;
     },
     "final_state: expected memory of its own, got an overlap with o"},
    {"o_overlaps_pool", D,
     [](World& w) {
       w.pool(2);
       w.t.o.data = static_cast<uint8_t*>(w.t.state_pool.data) + 256;
     },
     "state_pool: expected memory of its own, got an overlap with o"},
    {"data_misaligned", F, [](World& w) { w.t.q.data = static_cast<uint8_t*>(w.t.q.data) - 2; },
     "q: expected data aligned to 4 bytes, got a misaligned pointer"},
    {"half_misaligned", D,
     [](World& w) {
       w.t.g = w.memory.zeros(DType::bf16, {1, 8, 4}).view();
       w.t.g.data = static_cast<uint8_t*>(w.t.g.data) - 1;
     },
     "g: expected data aligned to 2 bytes, got a misaligned pointer"},
    {"index_misaligned", F,
     [](World& w) {
       w.pack({0, 8});
       w.t.cu_seqlens.data = static_cast<uint8_t*>(w.t.cu_seqlens.data) - 4;
     },
     "cu_seqlens: expected data aligned to 8 bytes, got a misaligned pointer"},
};
INSTANTIATE_TEST_SUITE_P(Memory, CallError, testing::ValuesIn(kMemoryErrors),
                         [](const auto& row) { return std::string(row.param.name); });

const Wrong kOptionErrors[] = {
    {"gate_form", F, [](World& w) { w.options.gate_form = 3; },
     "gate_form: expected log_decay (0), softplus (1) or bounded (2), got 3"},
    {"gate_form_negative", F, [](World& w) { w.options.gate_form = -1; },
     "gate_form: expected log_decay (0), softplus (1) or bounded (2), got -1"},
    {"beta_form", F, [](World& w) { w.options.beta_form = 3; },
     "beta_form: expected value (0), sigmoid (1) or 2sigmoid (2), got 3"},
    {"state_layout", F, [](World& w) { w.options.state_layout = 2; },
     "state_layout: expected kv (0) or vk (1), got 2"},
    {"split", F, [](World& w) { w.options.split = 4; },
     "split: expected auto (0), off (1), by_length (2) or a segment length (3), got 4"},
    {"l2norm", D, [](World& w) { w.options.qk_l2norm = 2; }, "qk_l2norm: expected 0 or 1, got 2"},
    {"reverse_flag", F, [](World& w) { w.options.reverse = 2; }, "reverse: expected 0 or 1, got 2"},
    {"reverse", F, [](World& w) { w.options.reverse = 1; },
     "reverse: expected 0 (cumsum alone has a direction), got 1"},
    {"has_scale", F, [](World& w) { w.options.has_scale = -1; },
     "has_scale: expected 0 or 1, got -1"},
    {"has_lower_bound", F, [](World& w) { w.options.has_lower_bound = 2; },
     "has_lower_bound: expected 0 or 1, got 2"},
    {"checked", F, [](World& w) { w.options.checked = 3; },
     "checked: expected 0 (default), 1 (on) or 2 (off), got 3"},
    {"chunk", F, [](World& w) { w.options.chunk = 48; }, "chunk: expected 16, 32 or 64, got 48"},
    {"chunk_negative", D, [](World& w) { w.options.chunk = -64; },
     "chunk: expected 16, 32 or 64, got -64"},
    {"threads_negative", F, [](World& w) { w.options.num_threads = -1; },
     "num_threads: expected 0 (default) to 4096, got -1"},
    {"threads_many", F, [](World& w) { w.options.num_threads = 4097; },
     "num_threads: expected 0 (default) to 4096, got 4097"},
    {"scale_nan", F,
     [](World& w) {
       w.options.has_scale = 1;
       w.options.scale = kNan;
     },
     "scale: expected a finite number, got nan"},
    {"scale_infinite", D,
     [](World& w) {
       w.options.has_scale = 1;
       w.options.scale = kInfinity;
     },
     "scale: expected a finite number, got inf"},
    {"softplus_without_A_log", F, [](World& w) { w.options.gate_form = DELTIC_GATE_SOFTPLUS; },
     "A_log: expected a tensor with the gate form softplus, got none"},
    {"softplus_without_g", F,
     [](World& w) {
       w.softplus();
       w.t.g = none();
     },
     "g: expected a tensor with the gate form softplus, got none"},
    {"bounded_without_g", D,
     [](World& w) {
       w.options.gate_form = DELTIC_GATE_BOUNDED;
       w.options.has_lower_bound = 1;
       w.options.lower_bound = -5;
       w.t.g = none();
     },
     "g: expected a tensor with the gate form bounded, got none"},
    {"A_log_with_log_decay", F,
     [](World& w) { w.t.A_log = w.memory.zeros(DType::f32, {4}).view(); },
     "A_log: expected none with the gate form log_decay, got a tensor"},
    {"dt_bias_with_log_decay", D,
     [](World& w) { w.t.dt_bias = w.memory.zeros(DType::f32, {4}).view(); },
     "dt_bias: expected none with the gate form log_decay, got a tensor"},
    {"A_log_without_gate", F,
     [](World& w) {
       w.t.g = none();
       w.t.A_log = w.memory.zeros(DType::f32, {4}).view();
     },
     "A_log: expected none with the gate form log_decay, got a tensor"},
    {"lower_bound_with_log_decay", F,
     [](World& w) {
       w.options.has_lower_bound = 1;
       w.options.lower_bound = -5;
     },
     "lower_bound: expected none without the gate form bounded, got -5"},
    {"lower_bound_with_softplus", F,
     [](World& w) {
       w.softplus();
       w.options.has_lower_bound = 1;
       w.options.lower_bound = -5;
     },
     "lower_bound: expected none without the gate form bounded, got -5"},
    {"bounded_without_bound", F, [](World& w) { w.options.gate_form = DELTIC_GATE_BOUNDED; },
     "lower_bound: expected a finite number below 0 with the gate form bounded, got none"},
    {"bound_zero", F,
     [](World& w) {
       w.options.gate_form = DELTIC_GATE_BOUNDED;
       w.options.has_lower_bound = 1;
     },
     "lower_bound: expected a finite number below 0, got 0"},
    {"bound_infinite", F,
     [](World& w) {
       w.options.gate_form = DELTIC_GATE_BOUNDED;
       w.options.has_lower_bound = 1;
       w.options.lower_bound = -kInfinity;
     },
     "lower_bound: expected a finite number below 0, got -inf"},
    {"bound_nan", D,
     [](World& w) {
       w.options.gate_form = DELTIC_GATE_BOUNDED;
       w.options.has_lower_bound = 1;
       w.options.lower_bound = kNan;
     },
     "lower_bound: expected a finite number below 0, got nan"},
    {"A_log_elements", F,
     [](World& w) {
       w.softplus();
       set_shape(w.t.A_log, {3});
     },
     "A_log: expected HV = 4 elements, got shape [3]"},
    {"dt_bias_elements", F,
     [](World& w) {
       w.softplus();
       w.t.dt_bias = w.memory.zeros(DType::f32, {4, 16}).view();
     },
     "dt_bias: expected HV = 4 elements, got shape [4, 16]"},
    {"dt_bias_elements_per_channel", F,
     [](World& w) {
       w.softplus();
       w.channel_gate();
       w.t.dt_bias = w.memory.zeros(DType::f32, {4}).view();
     },
     "dt_bias: expected HV*K = 64 elements, got shape [4]"},
    {"beta_form_without_beta", F,
     [](World& w) {
       w.options.beta_form = DELTIC_BETA_SIGMOID;
       w.t.beta = none();
     },
     "beta: expected a tensor with the beta form sigmoid or 2sigmoid, got none"},
    {"segment_length_missing", F, [](World& w) { w.options.split = DELTIC_SPLIT_SEGMENTS; },
     "segment_length: expected a number of tokens above 0, got 0"},
    {"segment_length_without_segments", F, [](World& w) { w.options.segment_length = 64; },
     "segment_length: expected 0 without split into segments, got 64"},
    {"split_by_length", F, [](World& w) { w.options.split = DELTIC_SPLIT_BY_LENGTH; },
     "split: expected auto or off on the CPU, got by_length", DELTIC_UNSUPPORTED},
    {"split_segments", F,
     [](World& w) {
       w.options.split = DELTIC_SPLIT_SEGMENTS;
       w.options.segment_length = 256;
     },
     "split: expected auto or off on the CPU, got a segment length", DELTIC_UNSUPPORTED},
};
INSTANTIATE_TEST_SUITE_P(Options, CallError, testing::ValuesIn(kOptionErrors),
                         [](const auto& row) { return std::string(row.param.name); });

const Wrong kListErrors[] = {
    {"cu_seqlens_rank", F,
     [](World& w) {
       w.t.cu_seqlens = w.memory.zeros(DType::i64, {2, 2}).view();
     },
     "cu_seqlens: expected one dimension, got shape [2, 2]"},
    {"cu_seqlens_empty", F,
     [](World& w) { w.t.cu_seqlens = w.memory.make(DType::i64, {0}).view(); },
     "cu_seqlens: expected at least one offset, got none"},
    {"cu_seqlens_with_batch", F,
     [](World& w) {
       set_shape(w.t.q, {2, 4, 2, 16});
       set_shape(w.t.k, {2, 4, 2, 16});
       set_shape(w.t.v, {2, 4, 4, 16});
       set_shape(w.t.o, {2, 4, 4, 16});
       set_shape(w.t.g, {2, 4, 4});
       set_shape(w.t.beta, {2, 4, 4});
       w.pack({0, 4});
     },
     "cu_seqlens: expected a batch of 1 with packed sequences, got 2"},
    {"host_copy_alone", F,
     [](World& w) {
       w.t.cu_seqlens_host = w.memory.list({0, 8});
     },
     "cu_seqlens_host: expected none without cu_seqlens, got a tensor"},
    {"host_copy_shape", F,
     [](World& w) {
       w.pack({0, 8});
       w.t.cu_seqlens_host = w.memory.list({0, 4, 8});
     },
     "cu_seqlens_host: expected shape [2], got [3]"},
    {"host_copy_differs", F,
     [](World& w) {
       w.pack({0, 3, 8});
       w.t.cu_seqlens_host = w.memory.list({0, 4, 8}, DType::i32);
     },
     "cu_seqlens_host: expected the values of cu_seqlens, got 4 for 3 at 1"},
    {"pool_and_initial_state", D,
     [](World& w) {
       w.pool(2);
       w.t.initial_state = w.memory.zeros(DType::f32, {1, 4, 16, 16}).view();
     },
     "initial_state: expected none with a state pool, got a tensor"},
    {"pool_and_final_state", D,
     [](World& w) {
       w.pool(2);
       w.t.final_state = w.memory.make(DType::f32, {1, 4, 16, 16}).view();
     },
     "final_state: expected none with a state pool, got a tensor"},
    {"pool_shape", D,
     [](World& w) {
       w.t.state_pool = w.memory.zeros(DType::f32, {2, 2, 16, 16}).view();
     },
     "state_pool: expected shape [2, 4, 16, 16], got [2, 2, 16, 16]"},
    {"pool_slots", D,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(1);
     },
     "state_pool: expected at least N = 2 slots without indices, got 1"},
    {"read_index_without_pool", D, [](World& w) { w.t.read_index = w.memory.list({0}); },
     "read_index: expected none without a state pool, got a tensor"},
    {"write_index_without_pool", D, [](World& w) { w.t.write_index = w.memory.list({0}); },
     "write_index: expected none without a state pool, got a tensor"},
    {"read_index_count", D,
     [](World& w) {
       w.pool(2);
       w.t.read_index = w.memory.list({0, 1});
     },
     "read_index: expected shape [1], got [2]"},
    {"write_index_count", D,
     [](World& w) {
       w.pool(2);
       w.t.write_index = w.memory.list({0, 1});
     },
     "write_index: expected N = 1 rows, got shape [2]"},
    {"write_index_per_token_in_forward", F,
     [](World& w) {
       w.pool(9);
       w.t.read_index = w.memory.list({0});
       w.t.write_index = w.memory.zeros(DType::i64, {1, 8}).view();
     },
     "write_index: expected one dimension, got shape [1, 8]"},
    {"write_index_per_token_columns", D,
     [](World& w) {
       w.pool(9);
       w.t.read_index = w.memory.list({0});
       w.t.write_index = w.memory.zeros(DType::i64, {1, 7}).view();
     },
     "write_index: expected at least T = 8 columns, got shape [1, 7]"},
    {"write_index_per_token_without_read_index", D,
     [](World& w) {
       w.pool(9);
       w.t.write_index = w.memory.zeros(DType::i64, {1, 8}).view();
     },
     "read_index: expected a tensor with a write index per token, got none"},
    {"checkpoint_list_missing", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.t.ckpt_slots = none();
     },
     "ckpt_slots: expected a tensor with the other checkpoint lists, got none"},
    {"checkpoint_states_missing", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.t.ckpt_states = none();
     },
     "ckpt_states: expected a tensor with the other checkpoint lists, got none"},
    {"checkpoint_cu_shape", F,
     [](World& w) {
       w.checkpoints({0, 1, 1}, {4}, {0}, 1);
     },
     "ckpt_cu: expected shape [2], got [3]"},
    {"checkpoint_slots_shape", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {0, 1}, 2);
     },
     "ckpt_slots: expected shape [1], got [2]"},
    {"checkpoint_states_shape", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {0}, 1);
       set_shape(w.t.ckpt_states, {1, 4, 16, 8});
     },
     "ckpt_states: expected shape [1, 4, 16, 16], got [1, 4, 16, 8]"},
};
INSTANTIATE_TEST_SUITE_P(Lists, CallError, testing::ValuesIn(kListErrors),
                         [](const auto& row) { return std::string(row.param.name); });

const Wrong kValueErrors[] = {
    {"cu_seqlens_first", F,
     [](World& w) {
       w.pack({1, 8});
     },
     "cu_seqlens: expected the first offset to be 0, got 1"},
    {"cu_seqlens_first_negative", D,
     [](World& w) {
       w.pack({-1, 8}, DType::i32);
     },
     "cu_seqlens: expected the first offset to be 0, got -1"},
    {"cu_seqlens_decreasing", F,
     [](World& w) {
       w.pack({0, 5, 3, 8});
     },
     "cu_seqlens: expected offsets that never decrease, got 3 after 5 at 2"},
    {"cu_seqlens_decreasing_by_one", D,
     [](World& w) {
       w.pack({0, 8, 7}, DType::i32);
     },
     "cu_seqlens: expected offsets that never decrease, got 7 after 8 at 2"},
    {"cu_seqlens_beyond", F,
     [](World& w) {
       w.pack({0, 3, 9});
     },
     "cu_seqlens: expected a last offset of at most T = 8, got 9"},
    {"cu_seqlens_beyond_32_bits", F,
     [](World& w) {
       w.pack({0, int64_t{1} << 32});
     },
     "cu_seqlens: expected a last offset of at most T = 8, got 4294967296"},
    {"read_index_range", D,
     [](World& w) {
       w.pool(2);
       w.t.read_index = w.memory.list({2});
     },
     "read_index: expected slots of -1 to 1, got 2 at 0"},
    {"read_index_below", F,
     [](World& w) {
       w.pool(2);
       w.t.read_index = w.memory.list({-2});
       w.t.write_index = w.memory.list({0});
     },
     "read_index: expected slots of -1 to 1, got -2 at 0"},
    {"write_index_range", F,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(2);
       w.t.write_index = w.memory.list({1, 7}, DType::i32);
     },
     "write_index: expected slots of -1 to 1, got 7 at 1"},
    {"written_twice", F,
     [](World& w) {
       w.pack({0, 2, 4, 8});
       w.pool(4);
       w.t.read_index = w.memory.list({-1, -1, -1});
       w.t.write_index = w.memory.list({3, 1, 3});
     },
     "write_index: expected every slot to be written once, got slot 3 for sequences 0 and 2"},
    {"written_twice_by_one_list", D,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(4);
       w.t.read_index = w.memory.list({2, 2});
     },
     "read_index: expected every slot to be written once, got slot 2 for sequences 0 and 1"},
    {"read_while_written", D,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(4);
       w.t.read_index = w.memory.list({0, 1});
       w.t.write_index = w.memory.list({1, 2});
     },
     "read_index: expected no slot that another sequence writes, got slot 1 for sequence 1, "
     "written by sequence 0"},
    {"read_before_written", F,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(4);
       w.t.read_index = w.memory.list({1, 0});
       w.t.write_index = w.memory.list({2, 1});
     },
     "read_index: expected no slot that another sequence writes, got slot 1 for sequence 0, "
     "written by sequence 1"},
    {"written_twice_by_tokens", D,
     [](World& w) {
       w.pool(8);
       w.t.read_index = w.memory.list({-1});
       Buffer& slots = w.memory.make(DType::i64, {1, 8});
       for (int64_t i = 0; i < 8; ++i) slots.set_index(i, i % 7);
       w.t.write_index = slots.view();
     },
     "write_index: expected every slot to be written once, got slot 0 twice for sequence 0"},
    {"token_slot_range", D,
     [](World& w) {
       w.pool(4);
       w.t.read_index = w.memory.list({-1});
       Buffer& slots = w.memory.make(DType::i32, {1, 8});
       for (int64_t i = 0; i < 8; ++i) slots.set_index(i, i);
       w.t.write_index = slots.view();
     },
     "write_index: expected slots of -1 to 3, got 4 at 0"},
    {"token_columns", D,
     [](World& w) {
       w.pack({0, 3, 8});
       w.pool(4);
       w.t.read_index = w.memory.list({-1, -1});
       Buffer& slots = w.memory.make(DType::i32, {2, 4});
       for (int64_t i = 0; i < 8; ++i) slots.set_index(i, -1);
       w.t.write_index = slots.view();
     },
     "write_index: expected a column for each of the 5 tokens of sequence 1, got 4"},
    {"checkpoints_first", F,
     [](World& w) {
       w.checkpoints({1, 1}, {4}, {0}, 1);
     },
     "ckpt_cu: expected the first offset to be 0, got 1"},
    {"checkpoints_decreasing", F,
     [](World& w) {
       w.pack({0, 3, 8});
       w.checkpoints({0, 2, 1}, {1, 2}, {0, 1}, 2);
     },
     "ckpt_cu: expected offsets that never decrease, up to M = 2, got 1 after 2 at 2"},
    {"checkpoints_beyond_list", F,
     [](World& w) {
       w.checkpoints({0, 2}, {4}, {0}, 1);
     },
     "ckpt_cu: expected offsets that never decrease, up to M = 1, got 2 after 0 at 1"},
    {"checkpoint_beyond_sequence", F,
     [](World& w) {
       w.pack({0, 3, 8});
       w.checkpoints({0, 1, 2}, {4, 2}, {0, 1}, 2);
     },
     "ckpt_tokens: expected 0 to 3, the length of sequence 0, got 4 at 0"},
    {"checkpoint_negative", D,
     [](World& w) {
       w.checkpoints({0, 1}, {-1}, {0}, 1);
     },
     "ckpt_tokens: expected 0 to 8, the length of sequence 0, got -1 at 0"},
    {"checkpoint_slot_range", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {1}, 1);
     },
     "ckpt_slots: expected slots of -1 to 0, got 1 at 0"},
    {"checkpoint_slot_below", F,
     [](World& w) {
       w.checkpoints({0, 1}, {4}, {-2}, 1);
     },
     "ckpt_slots: expected slots of -1 to 0, got -2 at 0"},
    {"checkpoint_slot_twice", F,
     [](World& w) {
       w.checkpoints({0, 2}, {4, 5}, {0, 0}, 1);
     },
     "ckpt_slots: expected every slot to be written once, got slot 0 twice for sequence 0"},
};
INSTANTIATE_TEST_SUITE_P(Values, CallError, testing::ValuesIn(kValueErrors),
                         [](const auto& row) { return std::string(row.param.name); });

// Checked mode looks at every number and names the first that is not finite.
void put(const deltic_tensor& t, int64_t offset, float x) {
  static_cast<float*>(t.data)[offset] = x;
}
const Wrong kCheckedErrors[] = {
    {"q_nan", F,
     [](World& w) {
       w.options.checked = 1;
       put(w.t.q, 5 * 32 + 16 + 3, kNan);
     },
     "q: expected finite values, got nan at sequence 0, token 5, head 1"},
    {"first_token_wins", F,
     [](World& w) {
       w.options.checked = 1;
       put(w.t.q, 6 * 32, kNan);
       put(w.t.v, 4 * 64 + 3 * 16, -kInfinity);
     },
     "v: expected finite values, got -inf at sequence 0, token 4, head 3"},
    {"token_within_sequence", D,
     [](World& w) {
       w.options.checked = 1;
       w.pack({0, 3, 8});
       put(w.t.beta, 4 * 4 + 2, kInfinity);
     },
     "beta: expected finite values, got inf at sequence 1, token 1, head 2"},
    {"g_nan", D,
     [](World& w) {
       w.options.checked = 1;
       put(w.t.g, 7 * 4 + 1, kNan);
     },
     "g: expected finite values, got nan at sequence 0, token 7, head 1"},
    {"initial_state_nan", F,
     [](World& w) {
       w.options.checked = 1;
       w.states(1);
       put(w.t.initial_state, 2 * 256 + 9, kNan);
     },
     "initial_state: expected finite values, got nan at sequence 0, head 2"},
    {"growing_gate", F,
     [](World& w) {
       w.options.checked = 1;
       for (int64_t t = 0; t < 8; ++t) put(w.t.g, t * 4 + 3, 1.5f);
     },
     "g: expected positive log decays that sum to less than 8 in a chunk, got 9 at sequence 0, "
     "token 5, head 3"},
};
INSTANTIATE_TEST_SUITE_P(Checked, CallError, testing::ValuesIn(kCheckedErrors),
                         [](const auto& row) { return std::string(row.param.name); });

// Slots are sorted in the workspace before the work: of many small sequences that is the larger
// part.
TEST(SlotsOfManySequences, FitIntoTheWorkspace) {
  constexpr int64_t N = 20000;
  std::vector<float> rows(N, 0.5f), o(N), pool(2 * N, 1.0f);
  std::vector<int64_t> read(N), write(N);
  for (size_t n = 0; n < N; ++n) read[n] = static_cast<int64_t>(n), write[n] = 2 * N - 1 - read[n];
  const TensorView view(rows.data(), {N, 1, 1, 1});
  const Tensors tensors{.q = view,
                        .k = view,
                        .v = view,
                        .o = {o.data(), {N, 1, 1, 1}},
                        .state_pool = {pool.data(), {2 * N, 1, 1, 1}},
                        .read_index = {read.data(), {N}},
                        .write_index = {write.data(), {N}}};
  for (const std::string& impl : runnable(Op::decode)) {
    write[0] = 2 * N - 1;
    EXPECT_NO_THROW(run_guarded({Op::decode, tensors}, {.num_threads = 1, .impl = impl})) << impl;
    write[0] = write[N - 1];
    EXPECT_THROW(run_guarded({Op::decode, tensors}, {.num_threads = 1, .impl = impl}), Error);
  }
}

// Positive log decays count chunk by chunk, and 8 is too many.
TEST(CheckedGates, SumsEndWithTheChunk) {
  constexpr int64_t T = 32, K = 16;
  std::vector<float> rows(T * K, 0.1f), o(rows.size()), g(T, -1.0f);
  const TensorView view(rows.data(), {1, T, 1, K});
  const Options options{.chunk = 16, .checked = true};
  const Tensors tensors{
      .q = view, .k = view, .v = view, .o = {o.data(), {1, T, 1, K}}, .g = {g.data(), {1, T, 1}}};
  for (const size_t t : {11u, 12u, 13u, 14u, 15u, 16u, 17u, 18u, 19u, 20u}) g[t] = 1.5f;
  EXPECT_NO_THROW(forward(options, tensors));
  g[21] = 0.5f;
  try {
    forward(options, tensors);
    ADD_FAILURE() << "a sum of 8 was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("got 8 at sequence 0, token 21, head 0"),
              std::string::npos)
        << error.what();
  }
}

// What forward keeps is memory of its own.
const Wrong kSaveErrors[] = {
    {"saved_without_save", F,
     [](World& w) {
       w.t.saved = {w.scratch, 64};
     },
     "saved: expected none without save, got 64 bytes"},
    {"save_with_a_pool", F,
     [](World& w) {
       w.pool(1);
       w.options.save = DELTIC_SAVE_ALL;
     },
     "save: expected none with a state pool, which has no gradient, got all"},
    {"saved_is_the_workspace", F,
     [](World& w) {
       w.options.save = DELTIC_SAVE_STATES;
       w.t.saved = {w.scratch, 512};
     },
     "saved: expected memory of its own, got an overlap with the workspace"},
    {"saved_is_q", F,
     [](World& w) {
       w.options.save = DELTIC_SAVE_STATES;
       const uintptr_t q = reinterpret_cast<uintptr_t>(w.t.q.data);
       w.t.saved = {reinterpret_cast<void*>((q + 63) / 64 * 64), 512};
     },
     "saved: expected memory of its own, got an overlap with a tensor"},
};
INSTANTIATE_TEST_SUITE_P(Save, CallError, testing::ValuesIn(kSaveErrors),
                         [](const auto& row) { return std::string(row.param.name); });

// Host memory that says it is on a GPU: a build without CUDA and a machine without a GPU say so.
TEST(ChoiceError, CudaTensorsWithoutAGpu) {
  const auto w = std::make_unique<World>();
  for (deltic_tensor* t : {&w->t.q, &w->t.k, &w->t.v, &w->t.o, &w->t.beta, &w->t.g}) {
    t->device_type = DELTIC_CUDA;
    t->device_index = 1000;  // where there is a GPU, there are not so many
  }
  const auto before = w->memory.bytes();
  const deltic_status status = w->call(DELTIC_FORWARD);
  const std::string text = deltic_last_error();
  EXPECT_TRUE(w->memory.bytes() == before);
  if (status == DELTIC_INVALID_ARGUMENT) {
    EXPECT_NE(text.find("got cuda:1000"), std::string::npos) << text;
  } else {
    EXPECT_EQ(status, DELTIC_UNSUPPORTED);
    EXPECT_EQ(text.rfind("forward: no implementation takes this call: th", 0), 0u) << text;
  }
}

// A name binds the implementation, it does not send device memory to the host.
TEST(ChoiceError, CpuImplementationIsNotRunOnCudaTensors) {
  for (const std::string& name : runnable(Op::forward)) {
    const auto w = std::make_unique<World>();
    for (deltic_tensor* t : {&w->t.q, &w->t.k, &w->t.v, &w->t.o, &w->t.beta, &w->t.g})
      t->device_type = DELTIC_CUDA;
    w->options.impl = name.c_str();
    const auto before = w->memory.bytes();
    EXPECT_NE(w->call(DELTIC_FORWARD), DELTIC_OK) << name;
    EXPECT_TRUE(w->memory.bytes() == before) << name;
  }
}

TEST(ChoiceError, UnknownNameListsTheNames) {
  const auto w = std::make_unique<World>();
  w->options.impl = "cpu.abacus";
  std::string names;
  for (const auto& i : implementations(Op::forward)) names += (names.empty() ? "" : ", ") + i.name;
  expect_error(*w, DELTIC_FORWARD, DELTIC_INVALID_ARGUMENT,
               "forward: impl: expected one of " + names + ", got cpu.abacus");
}

// ---- Workspace -------------------------------------------------------------------------------

class WorkspaceError : public testing::TestWithParam<deltic_op> {
 protected:
  // Something that needs scratch in every implementation: the check of pool indices alone does.
  void SetUp() override {
    w_.pool(2);
    w_.t.read_index = w_.memory.list({1});
    const auto fn =
        GetParam() == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
    ASSERT_EQ(fn(&w_.options, &w_.t, nullptr, &needed_), DELTIC_OK) << deltic_last_error();
    ASSERT_GT(needed_, 0u);
    ASSERT_LE(needed_, sizeof w_.scratch);
    expected_ = std::string(deltic_op_name(GetParam())) + ": workspace: expected ";
  }
  World& w_ = *new World;
  std::unique_ptr<World> owner_{&w_};
  uint64_t needed_ = 0;
  std::string expected_;
};

TEST_P(WorkspaceError, Null) {
  w_.workspace_pointer = nullptr;
  expect_error(w_, GetParam(), DELTIC_INVALID_ARGUMENT,
               expected_ + "at least " + std::to_string(needed_) + " bytes, got 0");
}
TEST_P(WorkspaceError, NullData) {
  w_.workspace.data = nullptr;
  expect_error(w_, GetParam(), DELTIC_INVALID_ARGUMENT,
               expected_ + std::to_string(needed_) + " bytes, got a null pointer");
}
TEST_P(WorkspaceError, OneByteShort) {
  w_.workspace.bytes = needed_ - 1;
  expect_error(w_, GetParam(), DELTIC_INVALID_ARGUMENT,
               expected_ + "at least " + std::to_string(needed_) + " bytes, got " +
                   std::to_string(needed_ - 1));
}
TEST_P(WorkspaceError, Misaligned) {
  w_.workspace.data = w_.scratch + 32;
  w_.workspace.bytes -= 32;
  expect_error(w_, GetParam(), DELTIC_INVALID_ARGUMENT,
               expected_ + "memory aligned to 64 bytes, got a misaligned pointer");
}
TEST_P(WorkspaceError, ExactSizeIsEnough) {
  w_.workspace.bytes = needed_;
  EXPECT_EQ(w_.call(GetParam()), DELTIC_OK) << deltic_last_error();
}
TEST_P(WorkspaceError, QueryWithoutResult) {
  const auto fn = GetParam() == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
  EXPECT_EQ(fn(&w_.options, &w_.t, nullptr, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(deltic_last_error()),
            std::string(deltic_op_name(GetParam())) + ": bytes: expected a pointer, got null");
}
TEST_P(WorkspaceError, QueryNeedsNoData) {
  const uint64_t with_data = needed_;
  for (deltic_tensor* t : {&w_.t.q, &w_.t.k, &w_.t.v, &w_.t.o, &w_.t.beta, &w_.t.g,
                           &w_.t.state_pool, &w_.t.read_index})
    t->data = nullptr;
  const auto fn = GetParam() == DELTIC_FORWARD ? deltic_forward_workspace : deltic_decode_workspace;
  uint64_t bytes = 0;
  EXPECT_EQ(fn(&w_.options, &w_.t, nullptr, &bytes), DELTIC_OK) << deltic_last_error();
  EXPECT_EQ(bytes, with_data);
}
INSTANTIATE_TEST_SUITE_P(Ops, WorkspaceError, testing::Values(DELTIC_FORWARD, DELTIC_DECODE),
                         [](const auto& row) { return std::string(deltic_op_name(row.param)); });

// ---- What looks wrong and is allowed ---------------------------------------------------------

class Allowed : public testing::TestWithParam<deltic_op> {
 protected:
  void expect_ok() { EXPECT_EQ(w_.call(GetParam()), DELTIC_OK) << deltic_last_error(); }
  World& w_ = *new World;
  std::unique_ptr<World> owner_{&w_};
};

TEST_P(Allowed, NullOptions) {
  w_.options_pointer = nullptr;
  expect_ok();
}
TEST_P(Allowed, LargerStructWithZeroTail) {
  struct Larger {
    deltic_options options;
    uint64_t tail;
  } larger{w_.options, 0};
  larger.options.size = sizeof larger;
  w_.options_pointer = &larger.options;
  expect_ok();
  larger.tail = 1;  // a field this library does not know
  expect_error(w_, GetParam(), DELTIC_INVALID_ARGUMENT,
               std::string(deltic_op_name(GetParam())) +
                   ": options.size: expected zeros behind the " +
                   std::to_string(sizeof(deltic_options)) + " bytes that deltic " +
                   deltic_version() + " knows, got " + std::to_string(sizeof larger) +
                   " bytes with a later version's field set");
}
TEST_P(Allowed, QAndKShareMemory) {
  w_.t.k = w_.t.q;
  expect_ok();
}
TEST_P(Allowed, ZeroStridesInInputs) {
  w_.t.q.strides[2] = 0;
  w_.t.v.strides[1] = 0;
  w_.t.g.strides[1] = 0;
  expect_ok();
}
TEST_P(Allowed, StateInPlace) {
  w_.states(1);
  w_.t.final_state = w_.t.initial_state;
  expect_ok();
}
TEST_P(Allowed, InterleavedTokens) {  // v and o are halves of the rows of one buffer
  Buffer& fused = w_.memory.zeros(DType::f32, {8, 128});
  w_.t.v = TensorView(fused.data(), DType::f32, {1, 8, 4, 16}).with_strides({1024, 128, 16, 1});
  w_.t.o =
      TensorView(fused.data() + 4 * 64, DType::f32, {1, 8, 4, 16}).with_strides({1024, 128, 16, 1});
  expect_ok();
}
TEST_P(Allowed, InterleavedHeads) {  // head h of v lies before head h of o
  Buffer& fused = w_.memory.zeros(DType::f32, {8, 4, 32});
  w_.t.v = TensorView(fused.data(), DType::f32, {1, 8, 4, 16}).with_strides({1024, 128, 32, 1});
  w_.t.o =
      TensorView(fused.data() + 4 * 16, DType::f32, {1, 8, 4, 16}).with_strides({1024, 128, 32, 1});
  expect_ok();
}
TEST_P(Allowed, InterleavedHeadMajor) {  // the same with heads outside of tokens
  Buffer& fused = w_.memory.zeros(DType::f32, {4, 8, 32});
  w_.t.v = TensorView(fused.data(), DType::f32, {1, 8, 4, 16}).with_strides({1024, 32, 256, 1});
  w_.t.o =
      TensorView(fused.data() + 4 * 16, DType::f32, {1, 8, 4, 16}).with_strides({1024, 32, 256, 1});
  expect_ok();
}
TEST_P(Allowed, StatesInterleavedBySequence) {  // [N, 2, HV, K, V]: before and after side by side
  w_.pack({0, 3, 8});
  Buffer& both = w_.memory.zeros(DType::f32, {2, 2, 4, 16, 16});
  w_.t.initial_state =
      TensorView(both.data(), DType::f32, {2, 4, 16, 16}).with_strides({2048, 256, 16, 1});
  w_.t.final_state = TensorView(both.data() + 4 * 1024, DType::f32, {2, 4, 16, 16})
                         .with_strides({2048, 256, 16, 1});
  expect_ok();
}
TEST_P(Allowed, AnyStrideWhereThereIsOneElement) {
  w_.t.q.strides[0] = 0;
  w_.t.o.strides[0] = 0;
  w_.t.v.strides[0] = 12345;
  expect_ok();
}
TEST_P(Allowed, NoTokens) {
  set_shape(w_.t.q, {1, 0, 2, 16});
  set_shape(w_.t.k, {1, 0, 2, 16});
  set_shape(w_.t.v, {1, 0, 4, 16});
  set_shape(w_.t.o, {1, 0, 4, 16});
  set_shape(w_.t.g, {1, 0, 4});
  set_shape(w_.t.beta, {1, 0, 4});
  for (deltic_tensor* t : {&w_.t.q, &w_.t.k, &w_.t.v, &w_.t.o, &w_.t.g, &w_.t.beta})
    t->data = nullptr;
  w_.states(1);
  put(w_.t.initial_state, 7, 3.5f);
  expect_ok();
  EXPECT_EQ(static_cast<float*>(w_.t.final_state.data)[7], 3.5f);
}
TEST_P(Allowed, NoSequences) {  // N = 0: every token is padding
  w_.pack({0});
  w_.t.initial_state = w_.memory.make(DType::f32, {0, 4, 16, 16}).view();
  expect_ok();
  for (int i = 0; i < 8 * 4 * 16; ++i) ASSERT_EQ(static_cast<float*>(w_.t.o.data)[i], 0.0f);
}
TEST_P(Allowed, NoBatch) {
  set_shape(w_.t.q, {0, 8, 2, 16});
  set_shape(w_.t.k, {0, 8, 2, 16});
  set_shape(w_.t.v, {0, 8, 4, 16});
  set_shape(w_.t.o, {0, 8, 4, 16});
  set_shape(w_.t.g, {0, 8, 4});
  set_shape(w_.t.beta, {0, 8, 4});
  expect_ok();
}
TEST_P(Allowed, UnusedCheckpointNeedsNoSoundToken) {
  w_.checkpoints({0, 2}, {4, 99}, {0, -1}, 1);
  expect_ok();
}
TEST_P(Allowed, ParametersInAnyShape) {
  w_.options.gate_form = DELTIC_GATE_SOFTPLUS;
  w_.channel_gate();
  w_.t.A_log = w_.memory.zeros(DType::bf16, {1, 1, 4, 1}).view();
  w_.t.dt_bias = w_.memory.zeros(DType::f16, {64}).view();
  expect_ok();
}
TEST_P(Allowed, GateWithoutChecksInCheckedMode) {
  w_.options.checked = 1;
  for (int64_t t = 0; t < 8; ++t) put(w_.t.g, t * 4, 0.9f);  // 7.2 in the chunk
  expect_ok();
}
INSTANTIATE_TEST_SUITE_P(Ops, Allowed, testing::Values(DELTIC_FORWARD, DELTIC_DECODE),
                         [](const auto& row) { return std::string(deltic_op_name(row.param)); });

TEST(AllowedInDecode, VectorBetaValueGateAndTokenSlots) {
  const auto w = std::make_unique<World>();
  w->t.beta = w->memory.zeros(DType::f32, {1, 8, 4, 16}).view();
  w->t.gv = w->memory.zeros(DType::bf16, {1, 8, 4, 16}).view();
  w->pool(9);
  w->t.read_index = w->memory.list({8});
  Buffer& slots = w->memory.make(DType::i32, {1, 10});  // more columns than tokens
  for (int64_t i = 0; i < 10; ++i) slots.set_index(i, i < 8 ? i : 1000);
  w->t.write_index = slots.view();
  EXPECT_EQ(w->call(DELTIC_DECODE), DELTIC_OK) << deltic_last_error();
}

// ---- Building blocks -------------------------------------------------------------------------

struct WrongBlock {
  const char* name;
  deltic_op op;
  std::function<void(BlockWorld&)> spoil;
  std::string text;  // behind `op: `
  deltic_status status = DELTIC_INVALID_ARGUMENT;
};
void PrintTo(const WrongBlock& wrong, std::ostream* out) { *out << wrong.name; }

class BlockError : public testing::TestWithParam<WrongBlock> {};

TEST_P(BlockError, NamesArgumentExpectedAndGot) {
  const WrongBlock& wrong = GetParam();
  const auto w = std::make_unique<BlockWorld>(wrong.op);
  ASSERT_EQ(w->call(wrong.op), DELTIC_OK) << deltic_last_error();
  wrong.spoil(*w);
  expect_error(*w, wrong.op, wrong.status,
               std::string(deltic_op_name(wrong.op)) + ": " + wrong.text);
}

const WrongBlock kBlockErrors[] = {
    {"null_tensors", DELTIC_KKT, [](BlockWorld& w) { w.tensors_pointer = nullptr; },
     "tensors: expected a struct, got a null pointer"},
    {"size", DELTIC_KKT, [](BlockWorld& w) { w.t.size = 8; },
     too_small("tensors", 2048, 8, "block_tensors")},
    {"cumsum_with_k", DELTIC_CUMSUM,
     [](BlockWorld& w) {
       w.t.k = w.memory.zeros(DType::f32, {1, 8, 2, 16}).view();
     },
     "k: expected none, got a tensor"},
    {"gate_with_beta", DELTIC_GATE,
     [](BlockWorld& w) {
       w.t.beta = w.memory.zeros(DType::f32, {1, 8, 4}).view();
     },
     "beta: expected none, got a tensor"},
    {"l2norm_with_a", DELTIC_L2NORM,
     [](BlockWorld& w) {
       w.t.a = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "a: expected none, got a tensor"},
    {"kkt_with_q", DELTIC_KKT, [](BlockWorld& w) { w.t.q = w.t.k; },
     "q: expected none, got a tensor"},
    {"kkt_with_A_log", DELTIC_KKT,
     [](BlockWorld& w) { w.t.A_log = w.memory.zeros(DType::f32, {4}).view(); },
     "A_log: expected none, got a tensor"},
    {"scores_with_beta", DELTIC_SCORES,
     [](BlockWorld& w) {
       w.t.beta = w.memory.zeros(DType::f32, {1, 8, 4}).view();
     },
     "beta: expected none, got a tensor"},
    {"scores_with_rstd", DELTIC_SCORES,
     [](BlockWorld& w) {
       w.t.rstd = w.memory.make(DType::f32, {1, 8, 2}).view();
     },
     "rstd: expected none, got a tensor"},
    {"inverse_with_g", DELTIC_INVERSE,
     [](BlockWorld& w) {
       w.t.g = w.memory.zeros(DType::f32, {1, 8, 4}).view();
     },
     "g: expected none, got a tensor"},
    {"wy_with_out", DELTIC_WY,
     [](BlockWorld& w) {
       w.t.out = w.memory.make(DType::f32, {1, 8, 4, 16}).view();
     },
     "out: expected none, got a tensor"},
    {"no_g", DELTIC_CUMSUM, [](BlockWorld& w) { w.t.g = none(); },
     "g: expected a tensor, got none"},
    {"no_out", DELTIC_KKT, [](BlockWorld& w) { w.t.out = none(); },
     "out: expected a tensor, got none"},
    {"no_a", DELTIC_WY, [](BlockWorld& w) { w.t.a = none(); }, "a: expected a tensor, got none"},
    {"out_shape", DELTIC_CUMSUM,
     [](BlockWorld& w) {
       set_shape(w.t.out, {1, 8, 2});
     },
     "out: expected shape [1, 8, 4], got [1, 8, 2]"},
    {"g_rank", DELTIC_GATE,
     [](BlockWorld& w) {
       set_shape(w.t.g, {8, 4});
     },
     "g: expected shape [B,T,HV] or [B,T,HV,K], got [8, 4]"},
    {"x_rank", DELTIC_L2NORM,
     [](BlockWorld& w) {
       set_shape(w.t.x, {8, 2, 16});
     },
     "x: expected shape [B,T,H,D], got [8, 2, 16]"},
    {"rstd_shape", DELTIC_L2NORM,
     [](BlockWorld& w) {
       w.t.rstd = w.memory.make(DType::f32, {1, 8, 4}).view();
     },
     "rstd: expected shape [1, 8, 2], got [1, 8, 4]"},
    {"rstd_dtype", DELTIC_L2NORM,
     [](BlockWorld& w) {
       w.t.rstd = w.memory.make(DType::bf16, {1, 8, 2}).view();
     },
     "rstd: expected fp32, got bf16"},
    {"kkt_width", DELTIC_KKT, [](BlockWorld& w) { w.options.chunk = 32; },
     "out: expected shape [1, 8, 4, 32], got [1, 8, 4, 16]"},
    {"kkt_heads", DELTIC_KKT,
     [](BlockWorld& w) {
       set_shape(w.t.out, {1, 8, 3, 16});
     },
     "out: expected a number of value heads HV that is a multiple of H = 2, got 3"},
    {"kkt_key_width", DELTIC_KKT,
     [](BlockWorld& w) {
       w.t.k = w.memory.zeros(DType::f32, {1, 8, 2, 272}).view();
     },
     "k: expected a key width K of 1 to 256, got 272"},
    {"scores_q_shape", DELTIC_SCORES,
     [](BlockWorld& w) {
       set_shape(w.t.q, {1, 8, 2, 8});
     },
     "q: expected shape [1, 8, 2, 16], got [1, 8, 2, 8]"},
    {"scores_inverse_no_a", DELTIC_SCORES_INVERSE, [](BlockWorld& w) { w.t.a = none(); },
     "a: expected a tensor, got none"},
    {"scores_inverse_a_shape", DELTIC_SCORES_INVERSE,
     [](BlockWorld& w) {
       set_shape(w.t.a, {1, 8, 2, 16});
     },
     "a: expected shape [1, 8, 4, 16], got [1, 8, 2, 16]"},
    {"scores_inverse_overlap", DELTIC_SCORES_INVERSE,
     [](BlockWorld& w) { w.t.a.data = w.t.out.data; },
     "out: expected memory of its own, got an overlap with a"},
    {"scores_inverse_over_q", DELTIC_SCORES_INVERSE, [](BlockWorld& w) { w.t.q.data = w.t.a.data; },
     "a: expected memory of its own, got an overlap with q"},
    {"scores_inverse_with_w", DELTIC_SCORES_INVERSE,
     [](BlockWorld& w) {
       w.t.w = w.memory.make(DType::f32, {1, 8, 4, 16}).view();
     },
     "w: expected none, got a tensor"},
    {"inverse_width", DELTIC_INVERSE,
     [](BlockWorld& w) {
       set_shape(w.t.a, {1, 8, 4, 8});
     },
     "a: expected a width of 16, 32 or 64, got 8"},
    {"inverse_width_between", DELTIC_INVERSE,
     [](BlockWorld& w) {
       w.options.chunk = 0;
       w.t.a = w.memory.zeros(DType::f32, {1, 8, 4, 48}).view();
       w.t.out = w.memory.make(DType::f32, {1, 8, 4, 48}).view();
     },
     "a: expected a width of 16, 32 or 64, got 48"},
    {"inverse_chunk", DELTIC_INVERSE, [](BlockWorld& w) { w.options.chunk = 32; },
     "chunk: expected the width of a, 16, got 32"},
    {"wy_v_without_u", DELTIC_WY,
     [](BlockWorld& w) {
       w.t.v = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "u: expected a tensor, as u goes with v, got none"},
    {"wy_qg_without_q", DELTIC_WY,
     [](BlockWorld& w) {
       w.t.qg = w.memory.make(DType::f32, {1, 8, 4, 16}).view();
     },
     "q: expected a tensor, as qg goes with q, got none"},
    {"wy_w_shape", DELTIC_WY,
     [](BlockWorld& w) {
       set_shape(w.t.w, {1, 8, 4, 8});
     },
     "w: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"f64", DELTIC_KKT,
     [](BlockWorld& w) {
       w.t.k = w.memory.zeros(DType::f64, {1, 8, 2, 16}).view();
     },
     "k: expected fp32, bf16 or fp16, got fp64 (taken by the implementation reference alone)"},
    {"integer_output", DELTIC_CUMSUM, [](BlockWorld& w) { w.t.out.dtype = DELTIC_I32; },
     "out: expected fp32, bf16 or fp16, got int32"},
    {"overlap", DELTIC_CUMSUM, [](BlockWorld& w) { w.t.out.data = w.t.g.data; },
     "out: expected memory of its own, got an overlap with g"},
    {"outputs_overlap", DELTIC_WY,
     [](BlockWorld& w) {
       w.t.kg = w.t.w;
       w.t.kg.data = static_cast<uint8_t*>(w.t.w.data) + 64;
     },
     "kg: expected memory of its own, got an overlap with w"},
    {"scale", DELTIC_KKT,
     [](BlockWorld& w) {
       w.options.has_scale = 1;
       w.options.scale = 2;
     },
     "scale: expected none, got 2"},
    {"reverse", DELTIC_GATE, [](BlockWorld& w) { w.options.reverse = 1; },
     "reverse: expected 0 (cumsum alone has a direction), got 1"},
    {"l2norm_option", DELTIC_SCORES, [](BlockWorld& w) { w.options.qk_l2norm = 1; },
     "qk_l2norm: expected 0 (l2norm is an operation of its own), got 1"},
    {"gate_form", DELTIC_KKT, [](BlockWorld& w) { w.options.gate_form = DELTIC_GATE_SOFTPLUS; },
     "gate_form: expected log_decay (g is the cumulative sum here), got 1"},
    {"beta_form", DELTIC_KKT, [](BlockWorld& w) { w.options.beta_form = DELTIC_BETA_SIGMOID; },
     "beta_form: expected value, got 1"},
    {"state_layout", DELTIC_WY, [](BlockWorld& w) { w.options.state_layout = DELTIC_STATE_VK; },
     "state_layout: expected kv (no state here), got vk"},
    {"split", DELTIC_WY, [](BlockWorld& w) { w.options.split = DELTIC_SPLIT_BY_LENGTH; },
     "split: expected auto or off, got 2"},
    {"softplus_without_A_log", DELTIC_CUMSUM,
     [](BlockWorld& w) { w.options.gate_form = DELTIC_GATE_SOFTPLUS; },
     "A_log: expected a tensor with the gate form softplus, got none"},
    {"cu_seqlens", DELTIC_CUMSUM,
     [](BlockWorld& w) {
       w.t.cu_seqlens = w.memory.list({0, 9});
     },
     "cu_seqlens: expected a last offset of at most T = 8, got 9"},
};
INSTANTIATE_TEST_SUITE_P(Blocks, BlockError, testing::ValuesIn(kBlockErrors), [](const auto& row) {
  return std::string(deltic_op_name(row.param.op)) + "_" + row.param.name;
});

// ---- Their gradients -------------------------------------------------------------------------

struct WrongGradient {
  const char* name;
  deltic_op op;
  std::function<void(GradientWorld&)> spoil;
  std::string text;  // behind `op: `
  deltic_status status = DELTIC_INVALID_ARGUMENT;
};
void PrintTo(const WrongGradient& wrong, std::ostream* out) { *out << wrong.name; }

class GradientError : public testing::TestWithParam<WrongGradient> {};

TEST_P(GradientError, NamesArgumentExpectedAndGot) {
  const WrongGradient& wrong = GetParam();
  const auto w = std::make_unique<GradientWorld>(wrong.op);
  ASSERT_EQ(w->call(wrong.op), DELTIC_OK) << deltic_last_error();
  wrong.spoil(*w);
  expect_error(*w, wrong.op, wrong.status,
               std::string(deltic_op_name(wrong.op)) + ": " + wrong.text);
}

using G = GradientWorld;
const WrongGradient kGradientErrors[] = {
    {"null_tensors", DELTIC_KKT, [](G& w) { w.backward_pointer = nullptr; },
     "tensors: expected a struct, got a null pointer"},
    {"size", DELTIC_KKT, [](G& w) { w.b.size = 8; },
     too_small("tensors", 1696, 8, "block_backward_tensors")},
    {"no_forward", DELTIC_KKT, [](G& w) { w.b.forward = nullptr; },
     "forward: expected a struct, got a null pointer"},
    {"forward_size", DELTIC_KKT, [](G& w) { w.inputs.size = 8; },
     too_small("forward", 2048, 8, "block_tensors")},
    {"no_d_out", DELTIC_SCORES, [](G& w) { w.b.d_out = none(); },
     "d_out: expected a tensor, got none"},
    {"no_k", DELTIC_KKT, [](G& w) { w.inputs.k = none(); }, "k: expected a tensor, got none"},
    {"with_out", DELTIC_KKT, [](G& w) { w.inputs.out = w.b.d_out; },
     "out: expected none in a gradient's call, got a tensor"},
    {"with_w", DELTIC_WY, [](G& w) { w.inputs.w = w.b.d_w; },
     "w: expected none in a gradient's call, got a tensor"},
    {"with_rstd", DELTIC_L2NORM,
     [](G& w) {
       w.inputs.rstd = w.memory.zeros(DType::f32, {1, 8, 2}).view();
     },
     "rstd: expected none in a gradient's call, got a tensor"},
    {"with_d_w", DELTIC_KKT, [](G& w) { w.b.d_w = w.b.d_out; }, "d_w: expected none, got a tensor"},
    {"d_out_shape", DELTIC_CUMSUM,
     [](G& w) {
       set_shape(w.b.d_out, {1, 8, 2});
     },
     "d_out: expected shape [1, 8, 4], got [1, 8, 2]"},
    {"d_out_width", DELTIC_KKT,
     [](G& w) {
       set_shape(w.b.d_out, {1, 4, 4, 32});
     },
     "d_out: expected shape [1, 8, 4, 16], got [1, 4, 4, 32]"},
    {"d_out_heads", DELTIC_KKT,
     [](G& w) {
       set_shape(w.b.d_out, {1, 8, 3, 16});
     },
     "d_out: expected a number of value heads HV that is a multiple of H = 2, got 3"},
    {"d_out_dtype", DELTIC_GATE, [](G& w) { w.b.d_out.dtype = DELTIC_I32; },
     "d_out: expected fp32, bf16 or fp16, got int32"},
    {"d_w_shape", DELTIC_WY,
     [](G& w) {
       set_shape(w.b.d_w, {1, 8, 4, 8});
     },
     "d_w: expected shape [1, 8, 4, 16], got [1, 8, 4, 8]"},
    {"d_u_without_v", DELTIC_WY,
     [](G& w) {
       w.b.d_u = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "d_u: expected none without v, got a tensor"},
    {"d_qg_without_q", DELTIC_WY,
     [](G& w) {
       w.b.d_qg = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "d_qg: expected none without q, got a tensor"},
    {"dg_without_g", DELTIC_KKT,
     [](G& w) {
       w.b.dg = w.memory.make(DType::f32, {1, 8, 4}).view();
     },
     "dg: expected none without g, got a tensor"},
    {"da_without_a", DELTIC_KKT,
     [](G& w) {
       w.b.da = w.memory.make(DType::f32, {1, 8, 4, 16}).view();
     },
     "da: expected none without a, got a tensor"},
    {"dA_log_without_A_log", DELTIC_GATE,
     [](G& w) { w.b.dA_log = w.memory.make(DType::f32, {4}).view(); },
     "dA_log: expected none without A_log, got a tensor"},
    {"dk_shape", DELTIC_KKT,
     [](G& w) {
       set_shape(w.b.dk, {1, 8, 4, 8});
     },
     "dk: expected shape [1, 8, 2, 16] as k, got [1, 8, 4, 8]"},
    {"dk_dtype", DELTIC_KKT, [](G& w) { w.b.dk.dtype = DELTIC_I32; },
     "dk: expected fp32, bf16 or fp16, got int32"},
    {"dk_strides", DELTIC_KKT, [](G& w) { w.b.dk.strides[1] = 0; },
     "dk: expected strides that give every element a place of its own, got [256, 0, 16, 1] for "
     "shape [1, 8, 2, 16]"},
    {"dk_is_k", DELTIC_KKT, [](G& w) { w.b.dk.data = w.inputs.k.data; },
     "dk: expected memory of its own, got an overlap with k"},
    {"dx_is_d_out", DELTIC_L2NORM, [](G& w) { w.b.dx.data = w.b.d_out.data; },
     "dx: expected memory of its own, got an overlap with d_out"},
    {"dq_is_dk", DELTIC_SCORES, [](G& w) { w.b.dk.data = w.b.dq.data; },
     "dk: expected memory of its own, got an overlap with dq"},
    {"inverse_of_nothing", DELTIC_INVERSE, [](G& w) { w.inputs.a = none(); },
     "out: expected a tensor (or a), got none"},
    {"inverse_of_both", DELTIC_INVERSE,
     [](G& w) {
       w.inputs.out = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
     },
     "out: expected none with a (one of them is enough), got a tensor"},
    {"inverse_width", DELTIC_INVERSE,
     [](G& w) {
       w.inputs.a = none();
       w.inputs.out = w.memory.zeros(DType::f32, {1, 8, 4, 24}).view();
     },
     "out: expected a width of 16, 32 or 64, got 24"},
    {"reverse", DELTIC_GATE, [](G& w) { w.options.reverse = 1; },
     "reverse: expected 0 (cumsum alone has a direction), got 1"},
    {"impl", DELTIC_KKT, [](G& w) { w.options.impl = "cpu.amx"; },
     "impl: expected one of " +
         [] {
           std::string names;
           for (const auto& i : implementations(Op::kkt))
             names += (names.empty() ? "" : ", ") + i.name;
           return names;
         }() +
         ", got cpu.amx"},
    {"no_workspace", DELTIC_KKT,
     [](G& w) {
       w.options.impl = "cpu.plain";
       w.options.num_threads = 1;
       w.workspace.bytes = 64;
     },
     "workspace: expected at least " +
         [] {
           GradientWorld w(DELTIC_KKT);
           w.options.impl = "cpu.plain";
           w.options.num_threads = 1;
           uint64_t bytes = 0;
           deltic_block_backward_workspace(DELTIC_KKT, &w.options, &w.b, nullptr, &bytes);
           return std::to_string(bytes);
         }() +
         " bytes, got 64"},
    {"workspace_is_a_gradient", DELTIC_KKT, [](G& w) { w.b.dk.data = w.scratch; },
     "workspace: expected memory of its own, got an overlap with a tensor"},
    {"workspace_is_an_input", DELTIC_KKT, [](G& w) { w.inputs.k.data = w.scratch; },
     "workspace: expected memory of its own, got an overlap with a tensor"},
    {"cu_seqlens", DELTIC_CUMSUM,
     [](G& w) {
       w.inputs.cu_seqlens = w.memory.list({0, 9});
     },
     "cu_seqlens: expected a last offset of at most T = 8, got 9"},
};
INSTANTIATE_TEST_SUITE_P(BlockGradients, GradientError, testing::ValuesIn(kGradientErrors),
                         [](const auto& row) {
                           return std::string(deltic_op_name(row.param.op)) + "_" + row.param.name;
                         });

TEST(OperationError, NotABlock) {
  const auto w = std::make_unique<BlockWorld>(DELTIC_KKT);
  EXPECT_EQ(w->call(DELTIC_FORWARD), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "block: op: expected a building block, 2 to 8, 11 or 12, got forward (0)");
  EXPECT_EQ(w->call(DELTIC_NUM_OPS), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               ("block: op: expected a building block, 2 to 8, 11 or 12, got unknown operation (" +
                std::to_string(DELTIC_NUM_OPS) + ")")
                   .c_str());
  EXPECT_EQ(w->query(DELTIC_DECODE), DELTIC_INVALID_ARGUMENT);
}
TEST(OperationError, ExplainTakesForwardAndDecode) {
  const auto w = std::make_unique<World>();
  const deltic_explain_fn fn = [](void*, const char*, int32_t, int32_t, const char*) {};
  EXPECT_EQ(deltic_explain(DELTIC_KKT, &w->options, &w->t, fn, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "explain: op: expected forward or decode, got kkt (5)");
  EXPECT_EQ(deltic_explain(DELTIC_FORWARD, &w->options, &w->t, nullptr, nullptr),
            DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "forward: fn: expected a function, got null");
}
TEST(OperationError, Settings) {
  EXPECT_EQ(deltic_set_num_threads(-1), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "set_num_threads: n: expected 0 (default) to 4096, got -1");
  EXPECT_EQ(deltic_set_checked(2), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "set_checked: on: expected -1 (environment), 0 or 1, got 2");
  EXPECT_EQ(deltic_info(nullptr, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "info: fn: expected a function, got null");
}
TEST(OperationError, ScoresInverseHasNoGradientOfItsOwn) {
  const auto w = std::make_unique<GradientWorld>(DELTIC_SCORES);
  EXPECT_EQ(w->call(DELTIC_SCORES_INVERSE), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "block_backward: op: expected a building block with a gradient of its own (that of "
               "scores_inverse is made of those of scores, inverse and kkt), got scores_inverse "
               "(11)");
  EXPECT_EQ(w->query(DELTIC_SCORES_INVERSE), DELTIC_INVALID_ARGUMENT);
}
TEST(OperationError, NotABlockWithAGradient) {
  const auto w = std::make_unique<GradientWorld>(DELTIC_SCORES);
  const std::string expected = "block_backward: op: expected a building block, 2 to 8 or 12, got ";
  const std::string unknown = "unknown operation (" + std::to_string(DELTIC_NUM_OPS) + ")";
  const std::pair<int, const char*> rows[] = {{DELTIC_DECODE, "decode (1)"},
                                              {DELTIC_CONV, "conv (10)"},
                                              {DELTIC_MOVE, "move (13)"},
                                              {DELTIC_NUM_OPS, unknown.c_str()},
                                              {-1, "unknown operation (-1)"}};
  for (const auto& [op, got] : rows) {
    EXPECT_EQ(w->call(static_cast<deltic_op>(op)), DELTIC_INVALID_ARGUMENT);
    EXPECT_EQ(deltic_last_error(), expected + got);
    EXPECT_EQ(w->query(static_cast<deltic_op>(op)), DELTIC_INVALID_ARGUMENT);
    EXPECT_EQ(deltic_last_error(), expected + got);
  }
}
TEST(OperationError, DeviceErrorWantsAWorkspaceOfAGpu) {
  EXPECT_EQ(deltic_device_error(nullptr, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "device_error: workspace: expected a struct, got a null pointer");
  alignas(64) std::byte host[256] = {};
  const deltic_workspace workspace{host, sizeof(host)};
  EXPECT_NE(deltic_device_error(&workspace, nullptr), DELTIC_OK);
  EXPECT_EQ(std::string_view(deltic_last_error())
                .find("device_error: workspace: expected that of a checked call on a GPU, got "),
            0u);
}
TEST(OperationError, ErrorsAreExceptionsInCpp) {
  Tensors tensors;
  try {
    forward({}, tensors);
    FAIL() << "no exception";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
    EXPECT_STREQ(e.what(), "forward: q: expected a tensor, got none");
  }
}

// ---- Backward --------------------------------------------------------------------------------

struct WrongBackward {
  const char* name;
  std::function<void(BackwardWorld&)> spoil;
  std::string text;  // behind `backward: `
  deltic_status status = DELTIC_INVALID_ARGUMENT;
};
void PrintTo(const WrongBackward& wrong, std::ostream* out) { *out << wrong.name; }

class BackwardError : public testing::TestWithParam<WrongBackward> {};

TEST_P(BackwardError, NamesArgumentExpectedAndGot) {
  const WrongBackward& wrong = GetParam();
  const auto w = std::make_unique<BackwardWorld>();
  ASSERT_EQ(w->call(DELTIC_BACKWARD), DELTIC_OK) << deltic_last_error();  // sound until spoiled
  wrong.spoil(*w);
  expect_error(*w, DELTIC_BACKWARD, wrong.status, "backward: " + wrong.text);
}

TEST(BackwardWorkspace, TooSmallOrAbsent) {
  const auto w = std::make_unique<BackwardWorld>();
  uint64_t bytes = 0;
  ASSERT_EQ(deltic_backward_workspace(&w->options, &w->b, nullptr, &bytes), DELTIC_OK);
  const std::string needed = "backward: workspace: expected at least " + std::to_string(bytes);
  w->workspace.bytes = bytes - 1;
  expect_error(*w, DELTIC_BACKWARD, DELTIC_INVALID_ARGUMENT,
               needed + " bytes, got " + std::to_string(bytes - 1));
  w->workspace_pointer = nullptr;
  expect_error(*w, DELTIC_BACKWARD, DELTIC_INVALID_ARGUMENT, needed + " bytes, got 0");
}

// Every input in turn moves into an output, with its values: whichever it is, it is named.
struct Input {
  const char* name;
  deltic_tensor* tensor;
};
template <class AnyWorld>
void expect_overlaps(AnyWorld& w, deltic_op op, const Input& output,
                     std::initializer_list<Input> inputs) {
  ASSERT_EQ(w.call(op), DELTIC_OK) << deltic_last_error();
  for (const auto& [name, tensor] : inputs) {
    const deltic_tensor before = *tensor;
    const size_t element = element_bytes(static_cast<DType>(before.dtype));
    const auto place = (reinterpret_cast<uintptr_t>(output.tensor->data) + element - 1) / element;
    size_t bytes = element;
    for (int32_t i = 0; i < before.rank; ++i) bytes *= static_cast<size_t>(before.shape[i]);
    tensor->data = reinterpret_cast<void*>(place * element);
    std::memcpy(tensor->data, before.data, bytes);
    expect_error(w, op, DELTIC_INVALID_ARGUMENT,
                 std::string(deltic_op_name(op)) + ": " + output.name +
                     ": expected memory of its own, got an overlap with " + name);
    *tensor = before;
  }
}

TEST(Overlap, OfEveryInputIsNamed) {
  const auto forward = std::make_unique<World>();
  deltic_tensors& t = forward->t;
  forward->pack({0, 3, 8});
  forward->softplus();
  forward->pool(4);
  forward->checkpoints({0, 1, 2}, {3, 2}, {0, 1}, 2);
  t.cu_seqlens_host = forward->memory.list({0, 3, 8});
  t.dt_bias = forward->memory.zeros(DType::f32, {4}).view();
  t.read_index = forward->memory.list({0, 1}), t.write_index = forward->memory.list({2, 3});
  expect_overlaps(*forward, DELTIC_FORWARD, {"o", &t.o},
                  {{"q", &t.q},
                   {"k", &t.k},
                   {"v", &t.v},
                   {"beta", &t.beta},
                   {"g", &t.g},
                   {"A_log", &t.A_log},
                   {"dt_bias", &t.dt_bias},
                   {"cu_seqlens", &t.cu_seqlens},
                   {"cu_seqlens_host", &t.cu_seqlens_host},
                   {"read_index", &t.read_index},
                   {"write_index", &t.write_index},
                   {"ckpt_cu", &t.ckpt_cu},
                   {"ckpt_tokens", &t.ckpt_tokens},
                   {"ckpt_slots", &t.ckpt_slots}});
  const auto decode = std::make_unique<World>();
  decode->t.gv = decode->memory.zeros(DType::f32, {1, 8, 4, 16}).view();
  expect_overlaps(*decode, DELTIC_DECODE, {"o", &decode->t.o}, {{"gv", &decode->t.gv}});

  const auto backward = std::make_unique<BackwardWorld>();
  deltic_tensors& of = backward->inputs;
  of.cu_seqlens = backward->memory.list({0, 8}), of.cu_seqlens_host = backward->memory.list({0, 8});
  of.dt_bias = backward->memory.zeros(DType::f32, {4}).view();
  of.gv = backward->memory.zeros(DType::f32, {1, 8, 4, 16}).view();
  expect_overlaps(*backward, DELTIC_BACKWARD, {"d_initial_state", &backward->b.d_initial_state},
                  {{"q", &of.q},
                   {"k", &of.k},
                   {"v", &of.v},
                   {"beta", &of.beta},
                   {"g", &of.g},
                   {"gv", &of.gv},
                   {"A_log", &of.A_log},
                   {"dt_bias", &of.dt_bias},
                   {"cu_seqlens", &of.cu_seqlens},
                   {"cu_seqlens_host", &of.cu_seqlens_host},
                   {"initial_state", &of.initial_state},
                   {"d_o", &backward->b.d_o},
                   {"d_final_state", &backward->b.d_final_state}});
}

using BW = BackwardWorld;
const WrongBackward kBackwardErrors[] = {
    {"null_tensors", [](BW& w) { w.backward_pointer = nullptr; },
     "tensors: expected a struct, got a null pointer"},
    {"size", [](BW& w) { w.b.size = 8; }, too_small("tensors", 1336, 8, "backward_tensors")},
    {"no_forward", [](BW& w) { w.b.forward = nullptr; },
     "forward: expected a struct, got a null pointer"},
    {"forward_size", [](BW& w) { w.inputs.size = 8; }, too_small("forward", 2424, 8, "tensors")},
    {"forward_size_large", [](BW& w) { w.inputs.size = sizeof(deltic_tensors) + 8192; },
     "forward.size: expected at most " + std::to_string(sizeof(deltic_tensors) + 4096) + ", got " +
         std::to_string(sizeof(deltic_tensors) + 8192) +
         " (sizeof the struct: see deltic_tensors_init)"},
    {"no_k", [](BW& w) { w.inputs.k = none(); }, "k: expected a tensor, got none"},
    {"with_o", [](BW& w) { w.inputs.o = w.t.o; },
     "o: expected none in a backward call, got a tensor"},
    {"with_final_state", [](BW& w) { w.inputs.final_state = w.t.final_state; },
     "final_state: expected none in a backward call, got a tensor"},
    {"with_pool",
     [](BW& w) {
       w.pool(2);
       w.inputs.state_pool = w.t.state_pool;
     },
     "state_pool: expected none in a backward call: pools are not differentiable, got a tensor"},
    {"with_checkpoints",
     [](BW& w) {
       w.checkpoints({0, 1}, {4}, {0}, 1);
       w.inputs.ckpt_states = w.t.ckpt_states;
     },
     "ckpt_states: expected none in a backward call: checkpoints are not differentiable, got a "
     "tensor"},
    {"d_o_shape",
     [](BW& w) {
       set_shape(w.b.d_o, {1, 8, 4, 15});
     },
     "d_o: expected shape [1, 8, 4, 16], got [1, 8, 4, 15]"},
    {"d_o_dtype", [](BW& w) { w.b.d_o.dtype = DELTIC_BF16; }, "d_o: expected fp32 as q, got bf16"},
    {"dq_shape",
     [](BW& w) {
       set_shape(w.b.dq, {1, 8, 1, 16});
     },
     "dq: expected shape [1, 8, 2, 16] as q, got [1, 8, 1, 16]"},
    {"dv_dtype", [](BW& w) { w.b.dv.dtype = DELTIC_F16; }, "dv: expected fp32 as v, got fp16"},
    {"dg_null", [](BW& w) { w.b.dg.data = nullptr; }, "dg: expected data, got a null pointer"},
    {"dbeta_without_beta", [](BW& w) { w.inputs.beta = none(); },
     "dbeta: expected none without beta, got a tensor"},
    {"dgv_without_gv", [](BW& w) { w.b.dgv = w.b.dv; },
     "dgv: expected none without gv, got a tensor"},
    {"ddt_bias_without_dt_bias", [](BW& w) { w.b.ddt_bias = w.b.dA_log; },
     "ddt_bias: expected none without dt_bias, got a tensor"},
    {"d_initial_without_initial", [](BW& w) { w.inputs.initial_state = none(); },
     "d_initial_state: expected none without initial_state, got a tensor"},
    {"d_final_dtype", [](BW& w) { w.b.d_final_state.dtype = DELTIC_BF16; },
     "d_final_state: expected fp32, got bf16"},
    {"d_final_shape",
     [](BW& w) {
       set_shape(w.b.d_final_state, {1, 4, 16, 15});
     },
     "d_final_state: expected shape [1, 4, 16, 16], got [1, 4, 16, 15]"},
    {"dq_is_q", [](BW& w) { w.b.dq.data = w.t.q.data; },
     "dq: expected memory of its own, got an overlap with q"},
    {"dk_is_dq", [](BW& w) { w.b.dk.data = w.b.dq.data; },
     "dk: expected memory of its own, got an overlap with dq"},
    {"saved_with_value_wise_beta",
     [](BW& w) {
       w.inputs.beta = w.memory.zeros(DType::f32, {1, 8, 4, 16}).view();
       w.b.dbeta = none();
       w.inputs.saved = {w.scratch, 64};
     },
     "saved: expected none with a value-wise beta or gv (decode keeps nothing), got 64 bytes"},
    {"saved_in_the_workspace",
     [](BW& w) {
       w.inputs.saved = {w.scratch + 64, 64};
     },
     "saved: expected memory of its own, got an overlap with the workspace"},
    {"saved_misaligned",
     [](BW& w) {
       w.inputs.saved = {w.scratch + 8, 64};
     },
     "saved: expected memory aligned to 64 bytes, got a misaligned pointer"},
    {"saved_null",
     [](BW& w) {
       w.inputs.saved = {nullptr, 64};
     },
     "saved: expected 64 bytes, got a null pointer"},
    {"softplus_without_A_log", [](BW& w) { w.inputs.A_log = none(); },
     "A_log: expected a tensor with the gate form softplus, got none"},
    {"chunk", [](BW& w) { w.options.chunk = 48; }, "chunk: expected 16, 32 or 64, got 48"},
    {"misaligned_workspace",
     [](BW& w) { w.workspace.data = w.scratch + 8, w.workspace.bytes -= 64; },
     "workspace: expected memory aligned to 64 bytes, got a misaligned pointer"},
    {"lengths",
     [](BW& w) {
       w.pack({0, 9});
       w.inputs.cu_seqlens = w.t.cu_seqlens;
     },
     "cu_seqlens: expected a last offset of at most T = 8, got 9"},
    {"d_o_nan",
     [](BW& w) {
       w.options.checked = 1;
       put(w.b.d_o, 3 * 64 + 2 * 16, kNan);
     },
     "d_o: expected finite values, got nan at sequence 0, token 3, head 2"},
    {"d_final_nan",
     [](BW& w) {
       w.options.checked = 1;
       put(w.b.d_final_state, 3 * 256 + 1, kNan);
     },
     "d_final_state: expected finite values, got nan at sequence 0, head 3"},
    {"A_log_infinite",
     [](BW& w) {
       w.options.checked = 1;
       put(w.inputs.A_log, 2, kInfinity);
     },
     "A_log: expected finite values, got inf at head 2"},
};
INSTANTIATE_TEST_SUITE_P(Backward, BackwardError, testing::ValuesIn(kBackwardErrors),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace deltic::test
