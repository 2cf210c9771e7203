// Gradients: the oracle against central differences and against the chunked form differentiated by
// hand; every implementation against the oracle and the contract.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gradients.h"

namespace deltic::test {
namespace {

// ---- Central differences -----------------------------------------------------------------------

double difference_error(GradientCall& call, size_t input, double step = kStep) {
  return difference_error(
      call.x[input], call.dx[input], [&] { return call.loss(); }, step);
}

void expect_central_differences(const GradientSetup& setup) {
  SCOPED_TRACE(name(setup));
  GradientCall call(setup);
  call.backward("reference");
  for (size_t i = 0; i < kNumInputs; ++i) {
    if (!call.x[i]) continue;
    // 1e-11 of curvature and 1e-11 of rounding are to be expected, times sums of some 10 terms.
    EXPECT_LT(difference_error(call, i), 1e-8) << kInputNames[i];
  }
}

struct GateOption {
  GateKind kind;
  GateForm form;
  bool has_A_log, has_dt_bias;
};

std::vector<GateOption> gate_options() {
  std::vector<GateOption> all{{GateKind::none, GateForm::log_decay, false, false}};
  for (GateKind kind : {GateKind::head, GateKind::channel}) {
    all.push_back({kind, GateForm::log_decay, false, false});
    for (bool has_dt_bias : {false, true}) {
      all.push_back({kind, GateForm::softplus, true, has_dt_bias});
      all.push_back({kind, GateForm::bounded, false, has_dt_bias});
      all.push_back({kind, GateForm::bounded, true, has_dt_bias});
    }
  }
  return all;
}

// Packed with an empty sequence and padding, or dense.
void place(GradientSetup& setup, bool dense) {
  setup.dense = dense;
  setup.padding = dense ? 0 : 2;
  if (dense) {
    setup.sequences = {{1, 3}, {2, 3}};
  } else {
    setup.sequences = {{1, 3}, {2, 0}, {3, 4}};
  }
}

// Every gate with every beta and the norm; placement, layout and states take turns.
TEST(BackwardOracle, CentralDifferencesOfForms) {
  unsigned turn = 0;
  for (const GateOption& gate : gate_options()) {
    for (int beta = 0; beta < 4; ++beta) {
      for (bool qk_l2norm : {false, true}) {
        ++turn;
        if (kSanitized && turn % 4 != 0) continue;
        GradientSetup setup{.gate = gate.kind,
                            .gate_form = gate.form,
                            .has_A_log = gate.has_A_log,
                            .has_dt_bias = gate.has_dt_bias,
                            .has_beta = beta != 3,
                            .beta_form = static_cast<BetaForm>(beta % 3),
                            .qk_l2norm = qk_l2norm,
                            .layout = static_cast<StateLayout>(turn / 2 % 2),
                            .has_initial = turn / 3 % 4 != 0,
                            .has_d_final = turn / 5 % 4 != 0};
        place(setup, turn % 3 == 0);
        setup.strided = turn % 5 == 0;
        expect_central_differences(setup);
      }
    }
  }
}

// Every placement, layout and set of states, for each kind of gate and grouping.
TEST(BackwardOracle, CentralDifferencesOfPlacements) {
  unsigned turn = 0;
  for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
    for (unsigned bits = 0; bits < 32; ++bits) {
      ++turn;
      if (kSanitized && turn % 4 != 0) continue;
      GradientSetup setup{.H = turn % 2 == 0 ? 1 : 2,
                          .HV = turn % 4 == 0 ? 3 : 2,
                          .gate = gate,
                          .layout = (bits & 1) != 0 ? StateLayout::vk : StateLayout::kv,
                          .has_initial = (bits & 2) != 0,
                          .has_d_o = (bits & 4) != 0,
                          .has_d_final = (bits & 8) != 0,
                          .scale = 0.75f};
      place(setup, (bits & 16) != 0);
      expect_central_differences(setup);
    }
  }
}

// A beta and a decay per value column, which the recurrence alone takes.
TEST(BackwardOracle, CentralDifferencesOfValueWiseNumbers) {
  for (const GateOption& gate : gate_options()) {
    for (BetaForm form : {BetaForm::value, BetaForm::sigmoid, BetaForm::two_sigmoid}) {
      for (int which : {1, 2, 3}) {
        GradientSetup setup{.gate = gate.kind,
                            .gate_form = gate.form,
                            .has_A_log = gate.has_A_log,
                            .has_dt_bias = gate.has_dt_bias,
                            .beta_form = form,
                            .value_beta = (which & 1) != 0,
                            .has_gv = (which & 2) != 0};
        place(setup, which == 3);
        expect_central_differences(setup);
      }
    }
  }
}

// At a zero row the norm's gradient is 1000 times the identity; it bends within 1e-3, so the step
// has to be far below that.
TEST(BackwardOracle, CentralDifferencesAtZeroRows) {
  GradientCall call({.sequences = {{1, 6}}, .keys = KeyValues::zero_rows, .qk_l2norm = true});
  call.backward("reference");
  for (size_t i : {size_t{kQ}, size_t{kK}}) {
    double at_zero_row = 0;
    for (int64_t d = 0; d < call.setup.K; ++d) {
      at_zero_row += std::fabs(call.dx[i].get(call.dx[i].at({0, 2, 0, d})));
    }
    EXPECT_GT(at_zero_row, 10) << "the zero row takes part";
    EXPECT_LT(difference_error(call, i, 0x1p-24), 1e-8) << kInputNames[i];
  }
}

// K = V = 1, scale 1, one token after S0 = 2:
//   a = 1/2, k = 3, v = 5, beta = 1/4, q = 2: S' = 1, e = 2, u = 1/2, S = 5/2, o = 5
// do = 1, dS = 0: dS = 2, dq = 5/2, du = 6, dbeta = 12, dv = 3/2, dk = 2/2 - 1 * 3/2 = -1/2,
//   dS' = 2 - 9/2 = -5/2, da = 2 * -5/2 = -5, dg = -5/2, dS0 = -5/4
TEST(BackwardOracle, ByHand) {
  const double q = 2, k = 3, v = 5, beta = 0.25, g = std::log(0.5), initial = 2, d_o = 1;
  double dq, dk, dv, dbeta, dg, d_initial;
  backward({.scale = 1.0f, .impl = "reference"},
           {.forward = {.q = {&q, {1, 1, 1, 1}},
                        .k = {&k, {1, 1, 1, 1}},
                        .v = {&v, {1, 1, 1, 1}},
                        .beta = {&beta, {1, 1, 1}},
                        .g = {&g, {1, 1, 1}},
                        .initial_state = {&initial, {1, 1, 1, 1}}},
            .d_o = {&d_o, {1, 1, 1, 1}},
            .dq = {&dq, {1, 1, 1, 1}},
            .dk = {&dk, {1, 1, 1, 1}},
            .dv = {&dv, {1, 1, 1, 1}},
            .dbeta = {&dbeta, {1, 1, 1}},
            .dg = {&dg, {1, 1, 1}},
            .d_initial_state = {&d_initial, {1, 1, 1, 1}}});
  EXPECT_NEAR(dq, 2.5, 1e-14);
  EXPECT_NEAR(dk, -0.5, 1e-14);
  EXPECT_NEAR(dv, 1.5, 1e-14);
  EXPECT_NEAR(dbeta, 12, 1e-13);
  EXPECT_NEAR(dg, -2.5, 1e-14);
  EXPECT_NEAR(d_initial, -1.25, 1e-14);
}

// ---- The chunked form, differentiated by hand --------------------------------------------------

struct Matrix {
  Matrix(int64_t r, int64_t c) : rows(r), columns(c), data(static_cast<size_t>(r * c), 0.0) {}
  double& operator()(int64_t i, int64_t j) { return data[static_cast<size_t>(i * columns + j)]; }
  double operator()(int64_t i, int64_t j) const {
    return data[static_cast<size_t>(i * columns + j)];
  }
  int64_t rows, columns;
  std::vector<double> data;
};

Matrix transposed(const Matrix& a) {
  Matrix b(a.columns, a.rows);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < a.columns; ++j) b(j, i) = a(i, j);
  return b;
}
Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t l = 0; l < a.columns; ++l)
      for (int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, l) * b(l, j);
  return c;
}
Matrix operator+(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}
Matrix operator-(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.data.size(); ++i) a.data[i] -= b.data[i];
  return a;
}

// One chunk of one head: rows are tokens. G is the cumulative sum of the log decay inside the
// chunk, a column per channel whatever the gate.
struct Chunk {
  Chunk(int64_t length, int64_t K, int64_t V)
      : q(length, K), k(length, K), G(length, K), v(length, V), d_o(length, V), beta(length, 1) {}

  double decay(int64_t i, int64_t j, int64_t d) const { return std::exp(G(i, d) - G(j, d)); }

  // Everything between the inputs and the outputs, from the state before the chunk.
  struct Inner {
    Matrix A, P, kb, vb, w, v_new, qg, kg;
  };
  Inner inner(const Matrix& S, double scale) const {
    const int64_t C = q.rows, K = q.columns, last = C - 1;
    Matrix L(C, C), A(C, C), P(C, C), kb = k, vb = v, qg = q, kg = k;
    for (int64_t i = 0; i < C; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        for (int64_t d = 0; d < K; ++d) {
          P(i, j) += scale * q(i, d) * k(j, d) * decay(i, j, d);
          if (j < i) L(i, j) += beta(i, 0) * k(i, d) * k(j, d) * decay(i, j, d);
        }
      }
      for (int64_t d = 0; d < K; ++d) {
        kb(i, d) *= beta(i, 0) * std::exp(G(i, d));
        qg(i, d) *= scale * std::exp(G(i, d));
        kg(i, d) *= decay(last, i, d);
      }
      for (int64_t c = 0; c < v.columns; ++c) vb(i, c) *= beta(i, 0);
      A(i, i) = 1;  // A = (I + L)^-1 by rows
      for (int64_t j = 0; j < i; ++j)
        for (int64_t m = 0; m <= j; ++m) A(i, m) -= L(i, j) * A(j, m);
    }
    const Matrix w = A * kb;
    const Matrix v_new = A * vb - w * S;
    return {A, P, kb, vb, w, v_new, qg, kg};
  }

  Matrix next_state(const Matrix& S, const Inner& x) const {
    Matrix next = transposed(x.kg) * x.v_new;
    for (int64_t d = 0; d < S.rows; ++d)
      for (int64_t c = 0; c < S.columns; ++c) next(d, c) += std::exp(G(G.rows - 1, d)) * S(d, c);
    return next;
  }

  Matrix q, k, G, v, d_o, beta;
};

struct ChunkGradient {
  Matrix dq, dk, dG, dv, dbeta, dS;  // dS: of the state before the chunk
};

// D is the gradient of the state after the chunk.
ChunkGradient differentiate(const Chunk& x, const Matrix& S, const Matrix& D, double scale) {
  const int64_t C = x.q.rows, K = x.q.columns, V = x.v.columns, last = C - 1;
  const Chunk::Inner m = x.inner(S, scale);
  const Matrix d_v_new = transposed(m.P) * x.d_o + m.kg * D;
  const Matrix dP = x.d_o * transposed(m.v_new);
  const Matrix dqg = x.d_o * transposed(S), dkg = m.v_new * transposed(D);
  const Matrix dw = Matrix(C, K) - d_v_new * transposed(S);
  const Matrix dvb = transposed(m.A) * d_v_new, dkb = transposed(m.A) * dw;
  const Matrix dA = d_v_new * transposed(m.vb) + dw * transposed(m.kb);
  // of -dL, below the diagonal
  const Matrix minus_dL = transposed(m.A) * dA * transposed(m.A);

  ChunkGradient r{Matrix(C, K), Matrix(C, K), Matrix(C, K),
                  Matrix(C, V), Matrix(C, 1), transposed(m.qg) * x.d_o - transposed(m.w) * d_v_new};
  for (int64_t d = 0; d < K; ++d) {
    for (int64_t c = 0; c < V; ++c) {
      const double carried = std::exp(x.G(last, d)) * D(d, c);
      r.dS(d, c) += carried;
      r.dG(last, d) += carried * S(d, c);
    }
  }
  for (int64_t i = 0; i < C; ++i) {
    for (int64_t c = 0; c < V; ++c) {
      r.dv(i, c) = x.beta(i, 0) * dvb(i, c);
      r.dbeta(i, 0) += x.v(i, c) * dvb(i, c);
    }
    for (int64_t d = 0; d < K; ++d) {
      const double e = std::exp(x.G(i, d));
      r.dq(i, d) += scale * e * dqg(i, d);
      r.dk(i, d) += x.decay(last, i, d) * dkg(i, d) + x.beta(i, 0) * e * dkb(i, d);
      r.dbeta(i, 0) += x.k(i, d) * e * dkb(i, d);
      r.dG(i, d) += m.qg(i, d) * dqg(i, d) - m.kg(i, d) * dkg(i, d) + m.kb(i, d) * dkb(i, d);
      r.dG(last, d) += m.kg(i, d) * dkg(i, d);
      for (int64_t j = 0; j <= i; ++j) {
        const double pair = x.decay(i, j, d);
        r.dq(i, d) += scale * dP(i, j) * x.k(j, d) * pair;
        r.dk(j, d) += scale * dP(i, j) * x.q(i, d) * pair;
        if (j == i) continue;  // exp(G_i - G_i) does not depend on G
        const double dL = -minus_dL(i, j);
        r.dk(i, d) += x.beta(i, 0) * dL * x.k(j, d) * pair;
        r.dk(j, d) += x.beta(i, 0) * dL * x.k(i, d) * pair;
        r.dbeta(i, 0) += dL * x.k(i, d) * x.k(j, d) * pair;
        const double by_G =
            (scale * dP(i, j) * x.q(i, d) + x.beta(i, 0) * dL * x.k(i, d)) * x.k(j, d) * pair;
        r.dG(i, d) += by_G;
        r.dG(j, d) -= by_G;
      }
    }
  }
  return r;
}

class BackwardAgainstChunkedForm : public testing::TestWithParam<GateKind> {};

TEST_P(BackwardAgainstChunkedForm, Agrees) {
  // More than two segments of the oracle, a last chunk that is not full, one q/k head for two.
  constexpr int64_t T = 150, H = 2, HV = 4, K = 5, V = 3, kChunk = 16;
  const GateKind gate = GetParam();
  GradientCall call({.H = H, .HV = HV, .K = K, .V = V, .sequences = {{4, T}}, .gate = gate});
  call.backward("reference");
  const double scale = 1.0f / std::sqrt(static_cast<float>(K));

  Matrix dq(T * H, K), dk(T * H, K);
  double worst = 0;
  const auto compare = [&worst](double want, double got) {
    const double difference = std::fabs(want - got) / (1 + std::fabs(want));
    worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
  };
  for (int64_t h = 0; h < HV; ++h) {
    const int64_t key_head = h / (HV / H);
    std::vector<Chunk> chunks;
    std::vector<Matrix> starts{Matrix(K, V)};
    Matrix D(K, V);
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t c = 0; c < V; ++c) {
        starts[0](d, c) = call.x[kInitial].get(call.x[kInitial].at({0, h, d, c}));
        D(d, c) = call.d_final.get(call.d_final.at({0, h, d, c}));
      }
    }
    for (int64_t begin = 0; begin < T; begin += kChunk) {
      Chunk x(std::min(kChunk, T - begin), K, V);
      for (int64_t i = 0; i < x.q.rows; ++i) {
        const int64_t t = begin + i;
        for (int64_t d = 0; d < K; ++d) {
          x.q(i, d) = call.x[kQ].get(call.x[kQ].at({0, t, key_head, d}));
          x.k(i, d) = call.x[kK].get(call.x[kK].at({0, t, key_head, d}));
          const double g = gate == GateKind::none   ? 0
                           : gate == GateKind::head ? call.x[kG].get(call.x[kG].at({0, t, h}))
                                                    : call.x[kG].get(call.x[kG].at({0, t, h, d}));
          x.G(i, d) = g + (i > 0 ? x.G(i - 1, d) : 0);
        }
        for (int64_t c = 0; c < V; ++c) {
          x.v(i, c) = call.x[kV].get(call.x[kV].at({0, t, h, c}));
          x.d_o(i, c) = call.d_o.get(call.d_o.at({0, t, h, c}));
        }
        x.beta(i, 0) = call.x[kBeta].get(call.x[kBeta].at({0, t, h}));
      }
      starts.push_back(x.next_state(starts.back(), x.inner(starts.back(), scale)));
      chunks.push_back(x);
    }
    for (size_t n = chunks.size(); n-- > 0;) {
      const ChunkGradient r = differentiate(chunks[n], starts[n], D, scale);
      const int64_t begin = static_cast<int64_t>(n) * kChunk;
      D = r.dS;
      std::vector<double> dg(K, 0.0);
      for (int64_t i = r.dq.rows - 1; i >= 0; --i) {
        const int64_t t = begin + i;
        double sum = 0;
        for (int64_t d = 0; d < K; ++d) {
          dq(t * H + key_head, d) += r.dq(i, d);
          dk(t * H + key_head, d) += r.dk(i, d);
          sum += dg[static_cast<size_t>(d)] += r.dG(i, d);
          if (gate == GateKind::channel) {
            compare(dg[static_cast<size_t>(d)], call.dx[kG].get(call.dx[kG].at({0, t, h, d})));
          }
        }
        if (gate == GateKind::head) compare(sum, call.dx[kG].get(call.dx[kG].at({0, t, h})));
        for (int64_t c = 0; c < V; ++c) {
          compare(r.dv(i, c), call.dx[kV].get(call.dx[kV].at({0, t, h, c})));
        }
        compare(r.dbeta(i, 0), call.dx[kBeta].get(call.dx[kBeta].at({0, t, h})));
      }
    }
    for (int64_t d = 0; d < K; ++d)
      for (int64_t c = 0; c < V; ++c)
        compare(D(d, c), call.dx[kInitial].get(call.dx[kInitial].at({0, h, d, c})));
  }
  for (int64_t row = 0; row < T * H; ++row) {
    for (int64_t d = 0; d < K; ++d) {
      compare(dq(row, d), call.dx[kQ].get(row * K + d));
      compare(dk(row, d), call.dx[kK].get(row * K + d));
    }
  }
  // The scale is an fp32 number, which both routes take.
  EXPECT_LT(worst, 1e-11);
}
INSTANTIATE_TEST_SUITE_P(Gates, BackwardAgainstChunkedForm,
                         testing::Values(GateKind::none, GateKind::head, GateKind::channel),
                         [](const auto& row) {
                           return std::string(row.param == GateKind::none   ? "none"
                                              : row.param == GateKind::head ? "head"
                                                                            : "channel");
                         });

// ---- Every implementation ----------------------------------------------------------------------

// The budget of the numerical contract, in the order of Input.
constexpr double kHalfBudget[] = {8e-3, 8e-3, 8e-3, 1.5e-2, 2e-2, 2e-2, 1e-2, 1e-2, 8e-3};
constexpr double kSingleBudget[] = {1e-4, 1e-4, 1e-4, 1e-4, 2e-4, 2e-4, 2e-4, 2e-4, 1e-4};

// The oracle on the same, already rounded inputs, with fp64 outputs.
GradientCall oracle_of(const GradientCall& call) {
  GradientCall oracle(with_dtype(call.setup, DType::f64));
  oracle.copy_inputs(call);
  oracle.backward("reference");
  return oracle;
}

void expect_close(const GradientSetup& setup, const double* budget) {
  SCOPED_TRACE(name(setup));
  GradientCall call(setup);
  const GradientCall oracle = oracle_of(call);
  for (const std::string& impl : takers(setup)) {
    call.backward(impl, 2);
    for (size_t i = 0; i < kNumInputs; ++i) {
      if (!call.x[i]) continue;
      EXPECT_LT(error(call.dx[i], oracle.dx[i]), budget[i]) << impl << " " << kInputNames[i];
    }
  }
}

struct Numerics {
  DType type;
  const double* budget;
};

TEST(Backward, StandardInputs) {
  for (const auto& [type, budget] : {Numerics{DType::f32, kSingleBudget},
                                     {DType::bf16, kHalfBudget},
                                     {DType::f16, kHalfBudget}}) {
    for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
      for (GateValues values : {GateValues::random, GateValues::slow}) {
        if (gate == GateKind::none && values == GateValues::slow) continue;
        GradientSetup setup{.H = 2,
                            .HV = 4,
                            .K = 32,
                            .V = 24,
                            .sequences = {{1, 70}, {2, 0}, {3, 130}, {4, 1}},
                            .padding = 3,
                            .gate = gate,
                            .gate_values = values};
        expect_close(with_dtype(setup, type), budget);
        setup.strided = true;
        setup.layout = StateLayout::vk;
        setup.beta_form = BetaForm::sigmoid;
        setup.qk_l2norm = true;
        expect_close(with_dtype(setup, type), budget);
      }
      if (gate == GateKind::none) continue;
      for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
        const GradientSetup setup{.H = 1,
                                  .HV = 2,
                                  .K = 64,
                                  .V = 64,
                                  .sequences = {{1, 200}},
                                  .dense = true,
                                  .gate = gate,
                                  .gate_form = form,
                                  .qk_l2norm = true};
        expect_close(with_dtype(setup, type), budget);
      }
    }
  }
}

// Parameters, states and gates with dtypes of their own, one number per dimension, wide values.
TEST(Backward, MixedTypesAndWidths) {
  GradientSetup setup = with_dtype({.H = 1,
                                    .HV = 2,
                                    .K = 16,
                                    .V = 40,
                                    .sequences = {{1, 90}},
                                    .gate = GateKind::channel,
                                    .gate_form = GateForm::softplus},
                                   DType::bf16);
  setup.gate_dtype = DType::f32;
  setup.beta_dtype = DType::f16;
  setup.param_dtype = DType::bf16;
  setup.state_dtype = DType::bf16;
  expect_close(setup, kHalfBudget);
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{1, 1}, {1, 70}, {33, 1}, {256, 3}}) {
    expect_close(
        with_dtype(
            {.H = 1, .HV = 1, .K = K, .V = V, .sequences = {{1, 67}}, .gate = GateKind::channel},
            DType::f32),
        kSingleBudget);
  }
}

void expect_finite(const GradientSetup& setup) {
  SCOPED_TRACE(name(setup));
  GradientCall call(setup);
  for (const std::string& impl : takers(setup)) {
    call.backward(impl);
    for (const Buffer& gradient : call.dx) {
      for (double x : values(gradient)) EXPECT_TRUE(std::isfinite(x)) << impl;
    }
  }
}

TEST(Backward, ValueWiseNumbers) {
  for (const auto& [type, budget] :
       {Numerics{DType::f32, kSingleBudget}, {DType::bf16, kHalfBudget}}) {
    for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
      for (const auto& [beta, gv] : {std::pair{true, false}, {false, true}, {true, true}}) {
        expect_close(with_dtype({.H = 1,
                                 .HV = 2,
                                 .K = 32,
                                 .V = 24,
                                 .sequences = {{1, 70}, {2, 0}, {3, 3}},
                                 .padding = 2,
                                 .gate = gate,
                                 .value_beta = beta,
                                 .has_gv = gv,
                                 .qk_l2norm = true},
                                type),
                     budget);
      }
    }
  }
}

// Finite and right where formulas have their corners.
TEST(Backward, Edges) {
  const auto single = [](GradientSetup setup) {
    setup.K = 16, setup.V = 12;
    setup.sequences = {{1, 70}, {2, 0}, {3, 5}};
    expect_close(with_dtype(setup, DType::f32), kSingleBudget);
    expect_finite(with_dtype(setup, DType::bf16));
  };
  for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
    single({.gate = gate, .keys = KeyValues::zero_rows, .qk_l2norm = true});
    for (double beta : {0.0, 1.0, 2.0}) single({.gate = gate, .beta_value = beta});
    for (double beta : {-200.0, 200.0}) {
      for (BetaForm form : {BetaForm::sigmoid, BetaForm::two_sigmoid}) {
        single({.gate = gate, .beta_form = form, .beta_value = beta});
      }
    }
    if (gate == GateKind::none) continue;
    for (GateValues values : {GateValues::zero, GateValues::deep5, GateValues::deep20,
                              GateValues::deep1000, GateValues::mixed, GateValues::growing}) {
      single({.gate = gate, .gate_values = values});
    }
    for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
      for (double scale : {30.0, 1000.0, 1e30}) {
        single({.gate = gate, .gate_form = form, .raw_gate_scale = scale});
      }
    }
  }
}

// exp(A_log) of 1e35 makes the log decay itself infinite in fp32.
TEST(Backward, InfiniteLogDecayIsFinite) {
  for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
    const GradientSetup setup =
        with_dtype({.sequences = {{1, 20}}, .gate_form = form, .raw_gate_scale = 1e5}, DType::f32);
    GradientCall call(setup);
    for (int64_t h = 0; h < setup.HV; ++h) call.x[kALog].set(h, 80);
    for (const std::string& impl : takers(setup)) {
      call.backward(impl);
      for (const Buffer& gradient : call.dx) {
        for (double x : values(gradient)) EXPECT_TRUE(std::isfinite(x)) << impl;
      }
    }
  }
}

// exp(A_log) itself has no fp32 number, the decays are ordinary: g + dt_bias around -A_log, or of
// either sign in the bounded form.
TEST(Backward, HugeRates) {
  for (GateKind gate : {GateKind::head, GateKind::channel}) {
    for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
      for (double A_log : {61.0, 89.0, 100.0}) {
        const GradientSetup setup =
            with_dtype({.K = 16, .V = 12, .sequences = {{1, 70}}, .gate = gate, .gate_form = form},
                       DType::f32);
        SCOPED_TRACE(name(setup) + " A_log " + std::to_string(A_log));
        GradientCall call(setup);
        for (int64_t at : offsets(call.x[kALog])) call.x[kALog].set(at, A_log);
        for (int64_t at : offsets(call.x[kG])) {
          if (form == GateForm::softplus) call.x[kG].set(at, call.x[kG].get(at) - A_log);
        }
        const GradientCall oracle = oracle_of(call);
        for (const std::string& impl : takers(setup)) {
          call.forward_keeping(impl, 2, Save::none);
          GradientCall want(call.setup);
          want.copy_inputs(call);
          want.forward_keeping("reference", 2, Save::none);
          EXPECT_LT(error(call.o, want.o), 1e-4) << impl;
          call.backward(impl, 2);
          for (size_t i = 0; i < kNumInputs; ++i) {
            if (!call.x[i]) continue;
            EXPECT_LT(error(call.dx[i], oracle.dx[i]), kSingleBudget[i])
                << impl << " " << kInputNames[i];
          }
        }
      }
    }
  }
}

std::vector<GradientSetup> contract_setups() {
  std::vector<GradientSetup> all;
  for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
    for (DType type : {DType::f32, DType::bf16}) {
      all.push_back(with_dtype(
          {.H = 2,
           .HV = 4,
           .K = 20,
           .V = 36,
           .sequences = {{1, 150}, {2, 0}, {3, 64}, {4, 1}, {5, 75}},
           .padding = 2,
           .gate = gate,
           .gate_form = gate == GateKind::none ? GateForm::log_decay : GateForm::softplus,
           .qk_l2norm = true},
          type));
    }
  }
  return all;
}

TEST(Backward, SameBitsForAnyThreadsAndInEveryRun) {
  for (const GradientSetup& setup : contract_setups()) {
    SCOPED_TRACE(name(setup));
    GradientCall call(setup);
    for (const std::string& impl : takers(setup, true)) {
      call.backward(impl, 1);
      const auto want = all_gradients(call);
      for (int32_t threads : {1, 2, 3, 8}) {
        call.backward(impl, threads);
        EXPECT_TRUE(all_gradients(call) == want) << impl << " threads=" << threads;
      }
    }
  }
}

TEST(Backward, SequencesDoNotDependOnTheirNeighbours) {
  for (const GradientSetup& setup : contract_setups()) {
    SCOPED_TRACE(name(setup));
    GradientCall packed(setup);
    for (const std::string& impl : takers(setup)) {
      packed.backward(impl, 2);
      for (int64_t n = 0; n < packed.num_sequences(); ++n) {
        GradientSetup one = setup;
        one.sequences = {setup.sequences[static_cast<size_t>(n)]};
        one.dense = true;
        one.padding = 0;
        one.strided = true;
        GradientCall alone(one);
        alone.backward(impl, 1);
        for (size_t i = 0; i <= kGv; ++i) {
          if (!packed.dx[i]) continue;
          EXPECT_TRUE(bytes_at(packed.dx[i], token_offsets(packed, packed.dx[i], n)) ==
                      bytes_at(alone.dx[i], token_offsets(alone, alone.dx[i], 0)))
              << impl << " " << kInputNames[i] << " sequence " << n;
        }
        const auto states = offsets(packed.dx[kInitial]);
        const size_t size = states.size() / setup.sequences.size();
        const auto first = states.begin() + static_cast<std::ptrdiff_t>(size) * n;
        EXPECT_TRUE(
            bytes_at(packed.dx[kInitial], {first, first + static_cast<std::ptrdiff_t>(size)}) ==
            bytes_at(alone.dx[kInitial], offsets(alone.dx[kInitial])))
            << impl << " initial_state, sequence " << n;
      }
    }
  }
}

// With d_o zero after token t and no d_final, nothing after t has a gradient.
TEST(Backward, GradientsDoNotReachLaterInputs) {
  for (GradientSetup setup : contract_setups()) {
    setup.has_d_final = false;
    setup.sequences = {{1, 150}};
    SCOPED_TRACE(name(setup));
    for (int64_t last : {0, 62, 63, 64, 100}) {
      GradientCall call(setup);
      for (int64_t at : token_offsets(call, call.d_o, 0, last + 1)) call.d_o.set(at, 0);
      for (const std::string& impl : takers(setup, true)) {
        call.backward(impl);
        for (size_t i = 0; i <= kGv; ++i) {
          if (!call.dx[i]) continue;
          double sum = 0;
          for (int64_t at : token_offsets(call, call.dx[i], 0, last + 1)) {
            sum += std::fabs(call.dx[i].get(at));
          }
          EXPECT_EQ(sum, 0) << impl << " " << kInputNames[i] << " after " << last;
        }
      }
    }
  }
}

// Keeping something for backward changes no bit of o and of the final state.
TEST(Backward, SavingGivesTheSameForwardBits) {
  for (const GradientSetup& setup : contract_setups()) {
    SCOPED_TRACE(name(setup));
    GradientCall call(setup);
    Tensors tensors = call.inputs();
    tensors.o = call.o.view();
    tensors.final_state = call.final_state.view();
    for (const std::string& impl : runnable(Op::forward)) {
      std::vector<uint8_t> o, state;
      for (const Save save : {Save::none, Save::states, Save::all}) {
        Options options = call.options;
        options.impl = impl;
        options.save = save;
        try {
          const Workspace saved(forward_saved_bytes(options, tensors));
          tensors.saved = saved.c();
          forward(options, tensors);
        } catch (const Error& refused) {
          EXPECT_EQ(refused.kind(), ErrorKind::unsupported) << refused.what();
          continue;
        }
        if (o.empty()) o = call.o.all_bytes(), state = call.final_state.all_bytes();
        EXPECT_TRUE(call.o.all_bytes() == o) << impl;
        EXPECT_TRUE(call.final_state.all_bytes() == state) << impl;
      }
    }
  }
}

// Each gradient alone has the bits it has among the others.
TEST(Backward, AskingForLessChangesNothing) {
  for (const GradientSetup& setup : contract_setups()) {
    SCOPED_TRACE(name(setup));
    GradientCall call(setup);
    for (const std::string& impl : takers(setup, true)) {
      call.backward(impl);
      const auto want = all_gradients(call);
      for (size_t i = 0; i < kNumInputs; ++i) {
        if (!call.x[i]) continue;
        call.backward(impl, 1, {static_cast<int>(i)});
        EXPECT_TRUE(call.dx[i].all_bytes() == want[i]) << impl << " " << kInputNames[i];
      }
    }
  }
}

// d_o or d_final left out is the same as zeros.
TEST(Backward, AbsentIsZero) {
  for (const GradientSetup& setup : contract_setups()) {
    SCOPED_TRACE(name(setup));
    for (bool without_d_o : {false, true}) {
      GradientSetup less = setup;
      (without_d_o ? less.has_d_o : less.has_d_final) = false;
      GradientCall with_zeros(setup), without(less);
      Buffer& zeros = without_d_o ? with_zeros.d_o : with_zeros.d_final;
      for (int64_t at : offsets(zeros)) zeros.set(at, 0);
      for (const std::string& impl : takers(setup, true)) {
        with_zeros.backward(impl);
        without.backward(impl);
        for (size_t i = 0; i < kNumInputs; ++i) {
          EXPECT_TRUE(values(with_zeros.dx[i]) == values(without.dx[i]))
              << impl << " " << kInputNames[i];
        }
      }
    }
  }
}

// The gradient of an empty sequence's initial state is that of its final state.
TEST(Backward, EmptySequences) {
  for (bool has_d_final : {true, false}) {
    const GradientSetup setup = with_dtype({.sequences = {{1, 0}, {2, 3}, {3, 0}},
                                            .gate_form = GateForm::softplus,
                                            .has_d_final = has_d_final},
                                           DType::f32);
    for (const std::string& impl : takers(setup, true)) {
      GradientCall call(setup);
      call.backward(impl);
      const Buffer& gradient = call.dx[kInitial];
      for (int64_t n : {0, 2}) {
        const int64_t size = setup.HV * setup.K * setup.V;
        for (int64_t i = n * size; i < (n + 1) * size; ++i) {
          EXPECT_EQ(gradient.get(i), has_d_final ? call.d_final.get(i) : 0) << impl;
        }
      }
    }
  }
}

TEST(Backward, NothingToDoLeavesZeros) {
  for (bool dense : {false, true}) {
    for (int64_t padding : {0, 3}) {
      GradientSetup setup = with_dtype({.sequences = {},
                                        .dense = dense,
                                        .padding = padding,
                                        .gate = GateKind::channel,
                                        .gate_form = GateForm::softplus},
                                       DType::f32);
      for (const std::string& impl : takers(setup, true)) {
        GradientCall call(setup);
        call.backward(impl, 2);
        for (int i : {int{kALog}, int{kDtBias}}) {
          for (double x : values(call.dx[static_cast<size_t>(i)])) EXPECT_EQ(x, 0) << impl;
        }
        setup.sequences = {{1, 0}, {2, 0}};  // T = 0
        GradientCall empty(setup);
        empty.backward(impl, 2);
        for (double x : values(empty.dx[kALog])) EXPECT_EQ(x, 0) << impl;
      }
    }
  }
}

// A million terms of one sign: fp32 sums would lose the last ones.
TEST(Backward, MillionTokenSums) {
  const int64_t T = int64_t{1} << (kSanitized ? 14 : 20);
  GradientSetup setup = with_dtype({.H = 1,
                                    .HV = 1,
                                    .K = 1,
                                    .V = 1,
                                    .sequences = {{1, T}},
                                    .dense = true,
                                    .gate_form = GateForm::softplus,
                                    .beta_value = 0.5,
                                    .has_initial = false},
                                   DType::f32);
  std::optional<GradientCall> oracle;
  for (DType param : {DType::f32, DType::bf16}) {
    setup.param_dtype = param;
    GradientCall call(setup);
    for (int64_t t = 0; t < T; ++t) {
      for (int input : {kQ, kK}) call.x[static_cast<size_t>(input)].set(t, 1);
      call.x[kV].set(t, std::fabs(call.x[kV].get(t)));
      call.d_o.set(t, 1);
    }
    call.x[kALog].set(0, 0.25);  // exact in bf16: one oracle for both
    call.x[kDtBias].set(0, -0.5);
    if (!oracle) {
      oracle = oracle_of(call);
      double sum = 0, magnitude = 0;
      for (double x : values(oracle->dx[kG])) {
        sum += x;
        magnitude += std::fabs(x);
      }
      EXPECT_EQ(std::fabs(sum), magnitude) << "one sign";
      EXPECT_NEAR(oracle->dx[kDtBias].get(0), sum, 1e-9 * magnitude) << "added to every g";
    }
    // 2^-8: the rounding of the stored bf16.
    const double budget = param == DType::f32 ? 1e-6 : 0x1p-8;
    for (const std::string& impl : takers(setup)) {
      call.backward(impl);
      EXPECT_LT(error(call.dx[kALog], oracle->dx[kALog]), budget) << impl;
      EXPECT_LT(error(call.dx[kDtBias], oracle->dx[kDtBias]), budget) << impl;
    }
  }
}

// The recurrent pass keeps of the order of sqrt(T) states.
TEST(Backward, PlainWorkspaceGrowsWithTheSquareRoot) {
  const auto bytes = [](int64_t T) {
    const Tensors inputs{.q = {static_cast<const float*>(nullptr), {1, T, 2, 64}},
                         .k = {static_cast<const float*>(nullptr), {1, T, 2, 64}},
                         .v = {static_cast<const float*>(nullptr), {1, T, 8, 64}}};
    return static_cast<double>(
        backward_workspace_bytes({.num_threads = 1, .impl = "cpu.plain"}, {.forward = inputs}));
  };
  constexpr double kState = 64 * 64 * sizeof(float);
  // Four value heads: 2 sqrt(4 T) states and what belongs to them.
  EXPECT_LT(bytes(1 << 14), 2.2 * 256 * kState);
  EXPECT_LT(bytes(1 << 20), 2.2 * 2048 * kState);
}

}  // namespace
}  // namespace deltic::test
