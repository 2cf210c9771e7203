// The building blocks' gradients: the oracle against central differences, every implementation
// against the oracle, and the blocks in a row against the differences of the whole.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "gradients.h"

namespace deltic::test {
namespace {

enum Tensor { kTq, kTk, kTv, kTx, kTg, kTbeta, kTa, kTA_log, kTdt_bias, kNumTensors };
constexpr const char* kTensorNames[] = {"q", "k", "v", "x", "g", "beta", "a", "A_log", "dt_bias"};
enum Result { kOut, kW, kU, kKg, kQg, kNumResults };

// Log decays: 0, -0.1, -5 and, if deep, -1000, drawn for every place.
enum class Decays { zero, mild, deep };

struct BlockSetup {
  Op op = Op::kkt;
  GateKind gate = GateKind::none;
  GateForm form = GateForm::log_decay;
  int64_t H = 2, HV = 4, K = 3, V = 2;
  std::vector<int64_t> lengths{18, 0, 1};  // packed, two rows of padding; dense: all the first
  bool dense = false, strided = false, reverse = false;
  int32_t chunk = 16;
  Decays decays = Decays::mild;
  bool has_beta = true, has_A_log = true, has_dt_bias = true;
  bool from_result = false;    // inverse: `out` instead of `a`
  unsigned wy_parts = 0b1111;  // w u kg qg
  DType dtype = DType::f64, gradient_dtype = DType::f64;
};

std::string name(const BlockSetup& s) {
  return std::string(deltic_op_name(static_cast<int32_t>(s.op))) +
         " gate=" + std::to_string(static_cast<int>(s.gate)) + "/" +
         std::to_string(static_cast<int>(s.form)) + "/" + std::to_string(int(s.decays)) +
         " chunk=" + std::to_string(s.chunk) + " K=" + std::to_string(s.K) +
         " V=" + std::to_string(s.V) + (s.dense ? " dense" : "") + (s.strided ? " strided" : "") +
         (s.reverse ? " reverse" : "") + (s.has_beta ? "" : " no beta") +
         (s.from_result ? " from result" : "") + " parts=" + std::to_string(s.wy_parts) + " " +
         dtype_name(s.dtype) + "/" + dtype_name(s.gradient_dtype);
}

// Multiples of 2^-10: with a power of two added they are exact in fp32, as which parameters are
// read.
double coarse(double x) { return std::round(x * 1024) / 1024; }

// A block's call with memory of its own. Padding, what lies above a diagonal and what lies past a
// partial chunk stays NaN in the inputs.
struct Call {
  explicit Call(const BlockSetup& setup) : s(setup) {
    N = static_cast<int64_t>(s.lengths.size());
    if (s.dense) {
      B = 2, T = s.lengths[0];
    } else {
      for (int64_t n : s.lengths) T += n;
      T += 2;
      cu = Buffer(DType::i64, {N + 1});
      int64_t sum = 0;
      cu.set_index(0, 0);
      for (int64_t n = 0; n < N; ++n) cu.set_index(n + 1, sum += s.lengths[size_t(n)]);
    }
    const bool pairs = s.op == Op::kkt || s.op == Op::scores || s.op == Op::wy;
    const bool sums = s.op == Op::cumsum || s.op == Op::gate;
    const auto heads = [&](int64_t width) { return shape({s.H, width}); };
    const auto values = [&](int64_t width) { return shape({s.HV, width}); };
    const auto gates = s.gate == GateKind::channel ? values(s.K) : shape({s.HV});
    const bool is_wy = s.op == Op::wy;
    if (pairs) x[kTk] = rows(heads(s.K), 0.4);
    if (s.op == Op::scores || (is_wy && part(kQg))) x[kTq] = rows(heads(s.K), 1);
    if (is_wy && part(kU)) x[kTv] = rows(values(s.V), 1);
    if (s.op == Op::l2norm) x[kTx] = rows(heads(s.K), 2);
    if (s.gate != GateKind::none) x[kTg] = sums ? rows(gates, 1, kRaw) : rows(gates, 1, kSums);
    if ((s.op == Op::kkt || is_wy) && s.has_beta) x[kTbeta] = rows(shape({s.HV}), 0.3, kBetas);
    if (s.op == Op::inverse || is_wy) x[kTa] = rows(values(s.chunk), 0.2, is_wy ? kLower : kStrict);
    if (s.form != GateForm::log_decay) {
      if (s.has_A_log) x[kTA_log] = params({s.HV});
      if (s.has_dt_bias)
        x[kTdt_bias] = params(s.gate == GateKind::channel ? std::vector<int64_t>{s.HV, s.K}
                                                          : std::vector<int64_t>{s.HV});
    }
    if (sums) add_result(kOut, gates, kAll);
    if (s.op == Op::l2norm) add_result(kOut, heads(s.K), kAll);
    if (s.op == Op::kkt || s.op == Op::inverse) add_result(kOut, values(s.chunk), kStrict);
    if (s.op == Op::scores) add_result(kOut, values(s.chunk), kLower);
    if (is_wy) {
      for (Result r : {kW, kKg, kQg}) {
        if (r == kW || part(r)) add_result(r, values(s.K), kAll);
      }
      if (part(kU)) add_result(kU, values(s.V), kAll);
      if (!part(kW)) d_result[kW] = {};  // an output, and nothing came back for it
    }
    options = {.gate_form = s.form, .chunk = s.chunk, .reverse = s.reverse, .num_threads = 1};
    if (s.form == GateForm::bounded) options.lower_bound = -5.0f;
    if (s.op == Op::cumsum || s.op == Op::scores) options.scale = 0.75f;
    for (size_t i = 0; i < kNumTensors; ++i) make_gradient(i);
    if (s.from_result) {
      a_inverse = Buffer(s.dtype, shape({s.HV, s.chunk}));
      BlockTensors t = inputs();
      t.out = a_inverse.view();
      Options o = options;
      o.impl = "reference";
      block(s.op, o, t);
    }
  }
  // The inputs share memory, the gradients are of another dtype.
  Call(const Call& other, DType gradients) : Call(other) {
    s.gradient_dtype = gradients;
    for (size_t i = 0; i < kNumTensors; ++i) make_gradient(i);
  }

  bool part(Result r) const { return (s.wy_parts >> (r - kW) & 1) != 0; }
  BlockTensors inputs() const {
    return {.q = x[kTq].view(),
            .k = x[kTk].view(),
            .v = x[kTv].view(),
            .x = x[kTx].view(),
            .g = x[kTg].view(),
            .beta = x[kTbeta].view(),
            .A_log = x[kTA_log].view(),
            .dt_bias = x[kTdt_bias].view(),
            .a = x[kTa].view(),
            .cu_seqlens = cu.view()};
  }
  // The oracle's outputs times what comes back for them.
  double loss() const {
    BlockTensors t = inputs();
    TensorView* views[] = {&t.out, &t.w, &t.u, &t.kg, &t.qg};
    for (size_t i = 0; i < kNumResults; ++i) *views[i] = result[i].view();
    Options o = options;
    o.impl = "reference";
    block(s.op, o, t);
    double sum = 0;
    for (size_t i = 0; i < kNumResults; ++i) {
      const auto a = offsets(result[i]), b = offsets(d_result[i]);
      for (size_t j = 0; j < b.size(); ++j) {
        const double d = d_result[i].get(b[j]);
        if (!std::isnan(d)) sum += d * result[i].get(a[j]);
      }
    }
    return sum;
  }
  BlockBackwardTensors tensors() const {
    BlockBackwardTensors t{.forward = inputs(),
                           .d_out = d_result[kOut].view(),
                           .d_w = d_result[kW].view(),
                           .d_u = d_result[kU].view(),
                           .d_kg = d_result[kKg].view(),
                           .d_qg = d_result[kQg].view(),
                           .dq = dx[kTq].view(),
                           .dk = dx[kTk].view(),
                           .dv = dx[kTv].view(),
                           .dx = dx[kTx].view(),
                           .dg = dx[kTg].view(),
                           .dbeta = dx[kTbeta].view(),
                           .da = dx[kTa].view(),
                           .dA_log = dx[kTA_log].view(),
                           .ddt_bias = dx[kTdt_bias].view()};
    if (s.from_result) {
      t.forward.a = {};
      t.forward.out = a_inverse.view();
    }
    return t;
  }
  bool taken_by(const std::string& impl) const {
    Options o = options;
    o.impl = impl;
    return cases::Call(s.op, tensors()).explain(o)[0].chosen;
  }
  // Gradients and workspace are NaN before; nothing else is written and padding is 0.
  void backward(const std::string& impl, int32_t threads = 1) {
    Options o = options;
    o.impl = impl;
    o.num_threads = threads;
    for (size_t i = 0; i < kNumTensors; ++i) make_gradient(i);
    std::vector<std::vector<uint8_t>> before;
    for (const Buffer& b : x) before.push_back(b ? b.all_bytes() : std::vector<uint8_t>{});
    run_guarded({s.op, tensors()}, o);
    for (size_t i = 0; i < kNumTensors; ++i) {
      if (!x[i]) continue;
      EXPECT_TRUE(x[i].all_bytes() == before[i]) << impl << ": " << kTensorNames[i];
      EXPECT_TRUE(dx[i].sentinels_intact()) << impl << ": d" << kTensorNames[i];
      const bool is_param = i == kTA_log || i == kTdt_bias;
      for (int64_t t0 = T - 2; !s.dense && !is_param && t0 < T; ++t0) {
        const TensorView v = dx[i].view();
        for (int64_t h = 0; h < v.shape[2]; ++h)
          for (int64_t d = 0; d < (v.rank == 4 ? v.shape[3] : 1); ++d)
            ASSERT_EQ(dx[i].get(dx[i].at({0, t0, h}) + d), 0.0) << impl << ": padding";
      }
    }
  }

  BlockSetup s;
  int64_t B = 1, T = 0, N = 0;
  Buffer cu{}, a_inverse{};
  std::array<Buffer, kNumTensors> x{}, dx{};
  std::array<Buffer, kNumResults> result{}, d_result{};
  Options options{};

 private:
  enum Fill { kAll, kRaw, kSums, kBetas, kLower, kStrict };

  std::vector<int64_t> shape(std::vector<int64_t> tail) const {
    tail.insert(tail.begin(), {B, T});
    return tail;
  }
  // Heads before tokens and gaps between rows, or contiguous.
  Buffer buffer(DType type, const std::vector<int64_t>& sizes) const {
    if (!s.strided) return Buffer(type, sizes);
    if (sizes.size() == 3) {
      const int64_t row = sizes[2] + 2;
      return Buffer(type, sizes, {sizes[1] * row + 3, row, 1});
    }
    const int64_t row = sizes[3] + 3, head = sizes[1] * row + 5;
    return Buffer(type, sizes, {sizes[2] * head, row, head, 1});
  }
  Buffer rows(const std::vector<int64_t>& sizes, double scale, Fill fill = kAll) {
    Buffer b = buffer(s.dtype, sizes);
    const auto seed = ++seed_;
    const int64_t width = sizes.size() == 4 ? sizes[3] : 1;
    for (int64_t n = 0; n < (s.dense ? B : N); ++n) {
      const int64_t length = s.dense ? T : s.lengths[size_t(n)];
      for (int64_t h = 0; h < sizes[2]; ++h) {
        for (int64_t d = 0; d < width; ++d) {
          double sum = 0;
          for (int64_t t = 0; t < length; ++t) {
            const auto draw = [&](uint64_t kind) {
              return uniform(seed + 100 * kind, uint64_t(n), uint64_t(t), uint64_t(h), uint64_t(d));
            };
            double value = scale * normal(seed, uint64_t(n), uint64_t(t), uint64_t(h), uint64_t(d));
            if (fill == kBetas) value = draw(1) < 0.1 ? 0 : value + 0.5;
            if (fill == kSums || (fill == kRaw && s.form == GateForm::log_decay)) {
              constexpr double kLevels[] = {-0.02, -0.1, -5, -1000};
              const int levels = s.decays == Decays::deep ? 4 : 3;
              value = s.decays == Decays::zero
                          ? 0
                          : kLevels[int(draw(1) * levels)] * (0.9 + 0.2 * draw(2));
              if (fill == kSums) {
                if (t % s.chunk == 0) sum = 0;
                value = sum += std::max(value, -104.0);
              }
            }
            const int64_t i = t % s.chunk;
            if ((fill == kStrict && d >= i) || (fill == kLower && d > i)) continue;
            b.set(b.at({s.dense ? n : 0, begin(n) + t, h}) + d, value);
          }
        }
      }
    }
    return b;
  }
  int64_t begin(int64_t n) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < n && !s.dense; ++i) sum += s.lengths[size_t(i)];
    return sum;
  }
  Buffer params(const std::vector<int64_t>& sizes) {
    Buffer b(s.dtype, sizes);
    const auto seed = ++seed_;
    for (int64_t at : offsets(b)) b.set(at, coarse(0.5 * normal(seed, uint64_t(at))));
    return b;
  }
  void add_result(Result r, const std::vector<int64_t>& sizes, Fill fill) {
    result[r] = buffer(s.dtype, sizes);
    d_result[r] = rows(sizes, 1, fill);
  }
  void make_gradient(size_t i) {
    if (!x[i]) return;
    const TensorView v = x[i].view();
    const std::vector<int64_t> sizes(v.shape, v.shape + v.rank);
    const bool is_param = i == kTA_log || i == kTdt_bias;
    dx[i] = is_param ? Buffer(s.gradient_dtype, sizes) : buffer(s.gradient_dtype, sizes);
  }

  uint64_t seed_ = 0;
};

// ---- The oracle against central differences ----------------------------------------------------

void expect_central_differences(const BlockSetup& setup) {
  static unsigned turn = 0;
  if (kSanitized && turn++ % 4 != 0) return;
  SCOPED_TRACE(name(setup));
  Call call(setup);
  call.backward("reference");
  // The rounding of a sum of numbers around 1000, over the step, is 3e-8.
  const double bound = setup.decays == Decays::deep ? 1e-7 : 1e-8;
  for (size_t i = 0; i < kNumTensors; ++i) {
    if (!call.x[i]) continue;
    EXPECT_LT(difference_error(call.x[i], call.dx[i], [&] { return call.loss(); }), bound)
        << kTensorNames[i];
  }
}

TEST(BlockGradientOracle, GatesAndSums) {
  unsigned turn = 0;
  for (Op op : {Op::cumsum, Op::gate}) {
    for (GateKind gate : {GateKind::head, GateKind::channel}) {
      for (GateForm form : {GateForm::log_decay, GateForm::softplus, GateForm::bounded}) {
        for (bool has_A_log : {true, false}) {
          for (bool has_dt_bias : {true, false}) {
            if (!has_A_log && form != GateForm::bounded) continue;
            for (bool reverse : {false, true}) {
              if (reverse && op == Op::gate) continue;
              ++turn;
              expect_central_differences({.op = op,
                                          .gate = gate,
                                          .form = form,
                                          .dense = turn % 2 == 0,
                                          .strided = turn % 3 == 0,
                                          .reverse = reverse,
                                          .decays = turn % 2 == 0 ? Decays::deep : Decays::mild,
                                          .has_A_log = has_A_log,
                                          .has_dt_bias = has_dt_bias});
            }
          }
        }
      }
    }
  }
}

TEST(BlockGradientOracle, Norm) {
  for (bool dense : {false, true}) {
    expect_central_differences({.op = Op::l2norm, .HV = 2, .K = 5, .dense = dense});
  }
}

TEST(BlockGradientOracle, PairsOfTokens) {
  unsigned turn = 0;
  for (Op op : {Op::kkt, Op::scores}) {
    for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
      for (Decays decays : {Decays::zero, Decays::mild, Decays::deep}) {
        for (bool has_beta : {true, false}) {
          if (!has_beta && op == Op::scores) continue;
          ++turn;
          expect_central_differences({.op = op,
                                      .gate = gate,
                                      .dense = turn % 2 == 0,
                                      .strided = turn % 3 == 0,
                                      .decays = decays,
                                      .has_beta = has_beta});
        }
      }
    }
  }
}

TEST(BlockGradientOracle, Inverse) {
  for (int32_t chunk : {16, 32}) {
    for (bool dense : {false, true}) {
      expect_central_differences(
          {.op = Op::inverse, .H = 1, .HV = 1, .dense = dense, .chunk = chunk});
    }
  }
  // From its result the same as from a.
  BlockSetup setup{.op = Op::inverse};
  Call from_a(setup);
  setup.from_result = true;
  Call from_result(setup);
  from_a.backward("reference"), from_result.backward("reference");
  EXPECT_LT(error(from_result.dx[kTa], from_a.dx[kTa]), 1e-14);
}

TEST(BlockGradientOracle, RowsAndValues) {
  unsigned turn = 0;
  for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
    for (unsigned parts : {0b0001u, 0b0010u, 0b0100u, 0b1000u, 0b0000u, 0b1111u}) {
      for (Decays decays : {Decays::mild, Decays::deep}) {
        ++turn;
        expect_central_differences({.op = Op::wy,
                                    .gate = gate,
                                    .dense = turn % 3 == 0,
                                    .strided = turn % 2 == 0,
                                    .decays = decays,
                                    .has_beta = turn % 5 != 0,
                                    .wy_parts = parts});
      }
    }
  }
}

// ---- Every implementation against the oracle ---------------------------------------------------

double tolerance(size_t tensor, DType type) {
  const bool is_gate = tensor == kTg || tensor == kTA_log || tensor == kTdt_bias;
  const double arithmetic = is_gate ? 2e-4 : 1e-4;
  return type == DType::bf16 ? 4e-3 : type == DType::f16 ? 5e-4 : arithmetic;
}

void expect_close(Call& call, Call& want) {
  SCOPED_TRACE(name(call.s));
  want.backward("reference");
  for (const std::string& impl : runnable(call.s.op)) {
    if (!call.taken_by(impl)) continue;
    call.backward(impl, 2);
    const auto first = call.dx;
    for (size_t i = 0; i < kNumTensors; ++i) {
      if (!call.x[i]) continue;
      const double e = error(call.dx[i], want.dx[i]);
      EXPECT_LE(e, tolerance(i, call.s.gradient_dtype)) << impl << ": d" << kTensorNames[i];
    }
    for (int32_t threads : {1, 5}) {
      if (impl == "reference") break;
      call.backward(impl, threads);
      for (size_t i = 0; i < kNumTensors; ++i) {
        if (!call.x[i]) continue;
        EXPECT_TRUE(call.dx[i].all_bytes() == first[i].all_bytes()) << impl << " " << threads;
      }
    }
  }
}

void expect_close_to_oracle(const BlockSetup& setup) {
  Call call(setup), want(call, DType::f64);
  expect_close(call, want);
}

struct Grid {
  int32_t chunk;
  GateKind gate;
};
std::string name(const Grid& grid) {
  constexpr const char* kNames[] = {"none_", "head_", "channel_"};
  return kNames[static_cast<int>(grid.gate)] + std::to_string(grid.chunk);
}
class BlockGradients : public testing::TestWithParam<Grid> {};

// All dtypes, placements and widths in turn, the first `count` of them.
void each_variant(const Grid& grid, BlockSetup setup, size_t count = 6) {
  struct Variant {
    DType dtype, gradient;
    int64_t H, HV, K, V;
    Decays decays;
    bool dense, strided;
  };
  constexpr DType f32 = DType::f32, bf16 = DType::bf16, f16 = DType::f16;
  const Variant variants[] = {{f32, f32, 2, 4, 24, 20, Decays::mild, false, false},
                              {f32, f32, 1, 3, 128, 72, Decays::deep, false, true},
                              {f32, bf16, 2, 2, 17, 130, Decays::mild, true, false},
                              {bf16, f32, 1, 2, 64, 64, Decays::mild, false, true},
                              {f16, f16, 2, 2, 40, 33, Decays::zero, true, true},
                              {bf16, bf16, 1, 1, 100, 16, Decays::deep, false, false}};
  setup.chunk = grid.chunk, setup.gate = grid.gate;
  setup.lengths = {100, 0, 1, 37};
  for (size_t i = 0; i < (kSanitized ? std::min<size_t>(count, 2) : count); ++i) {
    const Variant& v = variants[i];
    setup.dtype = v.dtype, setup.gradient_dtype = v.gradient;
    setup.H = v.H, setup.HV = v.HV, setup.K = v.K, setup.V = v.V;
    setup.decays = v.decays, setup.dense = v.dense, setup.strided = v.strided;
    expect_close_to_oracle(setup);
  }
}

TEST_P(BlockGradients, GatesAndSums) {
  if (GetParam().gate == GateKind::none) return;
  for (GateForm form : {GateForm::log_decay, GateForm::softplus, GateForm::bounded}) {
    each_variant(GetParam(), {.op = Op::gate, .form = form});
    for (bool reverse : {false, true}) {
      each_variant(GetParam(), {.op = Op::cumsum, .form = form, .reverse = reverse});
    }
  }
}
TEST_P(BlockGradients, KeyProducts) {
  each_variant(GetParam(), {.op = Op::kkt});
  each_variant(GetParam(), {.op = Op::kkt, .has_beta = false}, 1);
}
TEST_P(BlockGradients, Scores) { each_variant(GetParam(), {.op = Op::scores}); }
TEST_P(BlockGradients, RowsAndValues) {
  each_variant(GetParam(), {.op = Op::wy});
  for (unsigned parts : {0b0001u, 0b0010u, 0b0100u, 0b1000u, 0b0000u}) {
    each_variant(GetParam(), {.op = Op::wy, .has_beta = parts != 1, .wy_parts = parts}, 1);
  }
}
TEST(BlockGradient, NormAndInverse) {
  for (int32_t chunk : {16, 32, 64}) {
    const Grid grid{chunk, GateKind::none};
    each_variant(grid, {.op = Op::l2norm});
    for (bool from_result : {false, true}) {
      each_variant(grid, {.op = Op::inverse, .from_result = from_result});
    }
  }
}

constexpr Grid kGrid[] = {{16, GateKind::none}, {16, GateKind::head}, {16, GateKind::channel},
                          {32, GateKind::none}, {32, GateKind::head}, {32, GateKind::channel},
                          {64, GateKind::none}, {64, GateKind::head}, {64, GateKind::channel}};
INSTANTIATE_TEST_SUITE_P(All, BlockGradients, testing::ValuesIn(kGrid),
                         [](const auto& row) { return name(row.param); });

// A gradient that is not asked for changes no bit of the others.
TEST(BlockGradient, AnyChoiceOfGradients) {
  Call call({.op = Op::wy,
             .gate = GateKind::channel,
             .K = 24,
             .V = 20,
             .dtype = DType::f32,
             .gradient_dtype = DType::f32});
  for (const std::string& impl : runnable(Op::wy)) {
    call.backward(impl);
    const auto all = call.dx;
    for (size_t i = 0; i < kNumTensors; ++i) {
      if (!call.x[i]) continue;
      const TensorView as = call.dx[i].view();
      const Buffer one(DType::f32, {as.shape, as.shape + as.rank});
      BlockBackwardTensors t = call.tensors();
      TensorView* gradients[] = {&t.dq,    &t.dk, &t.dv,     &t.dx,      &t.dg,
                                 &t.dbeta, &t.da, &t.dA_log, &t.ddt_bias};
      for (TensorView* g : gradients) *g = {};
      *gradients[i] = one.view();
      Options o = call.options;
      o.impl = impl;
      block_backward(Op::wy, o, t);
      EXPECT_TRUE(one.all_bytes() == all[i].all_bytes()) << impl << ": d" << kTensorNames[i];
    }
  }
}

TEST(BlockGradient, NothingToDo) {
  for (Op op : {Op::cumsum, Op::gate, Op::l2norm, Op::kkt, Op::scores, Op::inverse, Op::wy}) {
    const bool gated = op == Op::cumsum || op == Op::gate;
    Call call({.op = op,
               .gate = gated ? GateKind::channel : GateKind::none,
               .form = gated ? GateForm::softplus : GateForm::log_decay,
               .lengths = {0, 0},
               .dtype = DType::f32,
               .gradient_dtype = DType::f32});
    for (const std::string& impl : runnable(op)) {
      call.backward(impl);
      for (size_t i : {size_t{kTA_log}, size_t{kTdt_bias}}) {
        for (int64_t at : offsets(call.dx[i])) EXPECT_EQ(call.dx[i].get(at), 0.0) << impl;
      }
    }
  }
}

// At a zero row the norm's gradient is 1000 times the identity.
TEST(BlockGradient, ZeroRowOfTheNorm) {
  const std::vector<float> x(8, 0.0f);
  std::vector<float> d(8), dx(8, NAN);
  for (size_t i = 0; i < 8; ++i) d[i] = static_cast<float>(i) - 3;
  for (const std::string& impl : runnable(Op::l2norm)) {
    l2norm_backward({.impl = impl}, {.forward = {.x = {x.data(), {1, 1, 1, 8}}},
                                     .d_out = {d.data(), {1, 1, 1, 8}},
                                     .dx = {dx.data(), {1, 1, 1, 8}}});
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(dx[i], 1000 * d[i], 0.01) << impl;
  }
}

// Below -104 the sum has the bound, which does not move with the gate.
TEST(BlockGradient, GatesBelowTheBoundOfTheSum) {
  constexpr float kGates[] = {-1, -104.5f, -103.5f, -150, -1000, 0};
  constexpr float kWant[] = {21, 0, 18, 0, 0, 6};  // of d_out = 1, 2, ..., 6: from there to the end
  for (const int64_t width : {int64_t{1}, int64_t{20}}) {
    const auto columns = static_cast<size_t>(width);
    std::vector<float> g(6 * columns), d(g.size()), dg(g.size(), NAN);
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = kGates[i / columns], d[i] = static_cast<float>(i / columns + 1);
    }
    for (const std::string& impl : runnable(Op::cumsum)) {
      cumsum_backward({.impl = impl}, {.forward = {.g = {g.data(), {1, 6, 1, width}}},
                                       .d_out = {d.data(), {1, 6, 1, width}},
                                       .dg = {dg.data(), {1, 6, 1, width}}});
      for (size_t i = 0; i < dg.size(); ++i)
        EXPECT_FLOAT_EQ(dg[i], kWant[i / columns]) << impl << " at " << i;
    }
  }
}

TEST(BlockGradient, Explain) {
  const Call call({.op = Op::kkt, .dtype = DType::f32, .gradient_dtype = DType::f32});
  const auto choices = explain(Op::kkt, call.options, call.tensors());
  ASSERT_FALSE(choices.empty());
  EXPECT_TRUE(choices[0].chosen);
  EXPECT_EQ(choices.size(), implementations(Op::kkt).size());
}

TEST(BlockGradient, CheckedModeNamesWhatCameBack) {
  Call call({.op = Op::kkt, .dtype = DType::f32, .gradient_dtype = DType::f32});
  Options o = call.options;
  o.checked = true;
  block_backward(Op::kkt, o, call.tensors());  // NaN on and above the diagonal is not read
  call.d_result[kOut].set(call.d_result[kOut].at({0, 5, 1, 2}), INFINITY);
  try {
    block_backward(Op::kkt, o, call.tensors());
    ADD_FAILURE() << "an infinite d_out went through";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "kkt: d_out: expected finite values, got inf at sequence 0, token 5, head 1");
  }
}

// ---- The blocks in a row -----------------------------------------------------------------------

// cumsum of a softplus gate -> kkt -> inverse -> wy, and the way back.
struct Chain {
  static constexpr int64_t T = 21, H = 1, HV = 2;
  int64_t K, V;
  int32_t chunk = 16;
  DType type;
  GateKind gate;
  Buffer q, k, v, raw, beta, A_log, dt_bias, G, L, A, w, u, kg, qg, d_w, d_u, d_kg, d_qg;
  std::string impl = "reference";

  Chain(DType dtype, GateKind kind, int64_t key_width, int64_t value_width)
      : K(key_width), V(value_width), type(dtype), gate(kind) {
    const std::vector<int64_t> keys{1, T, H, K}, rows{1, T, HV, K}, values{1, T, HV, V},
        square{1, T, HV, chunk}, scalars{1, T, HV};
    const auto gates = gate == GateKind::head ? scalars : rows;
    const double unit = 1 / std::sqrt(static_cast<double>(K));
    q = drawn(keys, 1), k = drawn(keys, unit), v = drawn(values, 1), raw = drawn(gates, 1);
    beta = drawn(scalars, 0.3), A_log = drawn({HV}, 0.5);
    dt_bias = gate == GateKind::head ? drawn({HV}, 0.5) : drawn({HV, K}, 0.5);
    d_w = drawn(rows, 1), d_u = drawn(values, 1), d_kg = drawn(rows, 1), d_qg = drawn(rows, 1);
    G = Buffer(type, gates), L = Buffer(type, square), A = Buffer(type, square);
    w = Buffer(type, rows), u = Buffer(type, values), kg = Buffer(type, rows);
    qg = Buffer(type, rows);
  }
  Buffer drawn(const std::vector<int64_t>& shape, double scale) {
    Buffer b(type, shape);
    ++seed_;
    for (int64_t at : offsets(b)) b.set(at, coarse(scale * normal(seed_, uint64_t(at))));
    return b;
  }
  Options options() const { return {.chunk = chunk, .num_threads = 1, .impl = impl}; }
  Options gate_options() const {
    Options o = options();
    o.gate_form = GateForm::softplus;
    if (gate == GateKind::head && impl != "reference") o.impl.clear();  // not all of them take it
    return o;
  }
  BlockTensors gate_inputs() const {
    return {.g = raw.view(), .A_log = A_log.view(), .dt_bias = dt_bias.view()};
  }
  BlockTensors kkt_inputs() const { return {.k = k.view(), .g = G.view(), .beta = beta.view()}; }
  BlockTensors wy_inputs() const {
    BlockTensors t = kkt_inputs();
    t.q = q.view(), t.v = v.view(), t.a = A.view();
    return t;
  }
  void forward() const {
    BlockTensors sum = gate_inputs(), products = kkt_inputs(), rows = wy_inputs();
    sum.out = G.view(), products.out = L.view();
    rows.w = w.view(), rows.u = u.view(), rows.kg = kg.view(), rows.qg = qg.view();
    cumsum(gate_options(), sum);
    kkt(options(), products);
    inverse(options(), {.a = L.view(), .out = A.view()});
    wy(options(), rows);
  }
  double loss() const {
    forward();
    double sum = 0;
    for (const auto& [x, d] : {std::pair{&w, &d_w}, {&u, &d_u}, {&kg, &d_kg}, {&qg, &d_qg}}) {
      for (int64_t at : offsets(*x)) sum += x->get(at) * d->get(at);
    }
    return sum;
  }
  // q k v raw beta A_log dt_bias
  std::array<Buffer, 7> backward() const {
    forward();
    const auto like = [&](const Buffer& b) {
      const TensorView view = b.view();
      return Buffer(type, {view.shape, view.shape + view.rank});
    };
    const auto add = [](Buffer& a, const Buffer& b) {
      for (int64_t at : offsets(a)) a.set(at, a.get(at) + b.get(at));
    };
    Buffer dq = like(q), dk = like(k), dv = like(v), draw = like(raw), dbeta = like(beta),
           dA_log = like(A_log), ddt_bias = like(dt_bias), dG = like(G), dA = like(A), dL = like(L),
           dk2 = like(k), dbeta2 = like(beta), dG2 = like(G);
    wy_backward(options(), {.forward = wy_inputs(),
                            .d_w = d_w.view(),
                            .d_u = d_u.view(),
                            .d_kg = d_kg.view(),
                            .d_qg = d_qg.view(),
                            .dq = dq.view(),
                            .dk = dk.view(),
                            .dv = dv.view(),
                            .dg = dG.view(),
                            .dbeta = dbeta.view(),
                            .da = dA.view()});
    inverse_backward(options(),
                     {.forward = {.out = A.view()}, .d_out = dA.view(), .da = dL.view()});
    kkt_backward(options(), {.forward = kkt_inputs(),
                             .d_out = dL.view(),
                             .dk = dk2.view(),
                             .dg = dG2.view(),
                             .dbeta = dbeta2.view()});
    add(dk, dk2), add(dbeta, dbeta2), add(dG, dG2);
    cumsum_backward(gate_options(), {.forward = gate_inputs(),
                                     .d_out = dG.view(),
                                     .dg = draw.view(),
                                     .dA_log = dA_log.view(),
                                     .ddt_bias = ddt_bias.view()});
    return {dq, dk, dv, draw, dbeta, dA_log, ddt_bias};
  }

 private:
  uint64_t seed_ = 900;
};
constexpr const char* kChainNames[] = {"q", "k", "v", "g", "beta", "A_log", "dt_bias"};

class BlockChain : public testing::TestWithParam<GateKind> {};

TEST_P(BlockChain, HasTheGradientOfTheWhole) {
  Chain chain(DType::f64, GetParam(), 3, 2);
  const auto gradients = chain.backward();
  Buffer* inputs[] = {&chain.q,    &chain.k,     &chain.v,      &chain.raw,
                      &chain.beta, &chain.A_log, &chain.dt_bias};
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_LT(difference_error(*inputs[i], gradients[i], [&] { return chain.loss(); }), 1e-7)
        << kChainNames[i];
  }
}

TEST_P(BlockChain, EveryImplementation) {
  const auto want = Chain(DType::f64, GetParam(), 64, 48).backward();
  for (const std::string& impl : runnable(Op::wy)) {
    Chain chain(DType::f32, GetParam(), 64, 48);
    chain.impl = impl;
    const auto got = chain.backward();
    for (size_t i = 0; i < got.size(); ++i) {
      const bool is_gate = i == 3 || i > 4;
      EXPECT_LE(error(got[i], want[i]), is_gate ? 2e-4 : 1e-4) << impl << ": " << kChainNames[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BlockChain, testing::Values(GateKind::head, GateKind::channel),
                         [](const auto& row) {
                           return row.param == GateKind::head ? "head" : "channel";
                         });

}  // namespace
}  // namespace deltic::test
