// The oracle itself: tiny examples worked by hand, and a second route written as matrices.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support.h"

namespace deltic::test {
namespace {

const Options kOracle{.impl = "reference"};

// ---- By hand ---------------------------------------------------------------------------------

// K = V = 1, scale 1: every quantity is a number.
//   S0 = 2
//   t0: g = ln 1/2, k = 3, v = 5, beta = 1/4, q = 2
//       S' = 1, u = 1/4 (5 - 3) = 1/2, S = 1 + 3/2 = 5/2, o = 5
//   t1: g = 0, k = 1, v = 0, beta = 1, q = 7
//       S' = 5/2, u = -5/2, S = 0, o = 0
//   t2: g = -3, k = 2, v = 4, beta = 1/2, q = 1
//       S' = 0, u = 2, S = 4, o = 4
TEST(OracleByHand, OneByOne) {
  for (Op op : {Op::forward, Op::decode}) {
    const std::vector<double> q{2, 7, 1}, k{3, 1, 2}, v{5, 0, 4}, beta{0.25, 1, 0.5},
        g{std::log(0.5), 0, -3}, initial{2};
    std::vector<double> o(3, NAN), final_state(1, NAN);
    const Options options{.scale = 1.0f, .impl = "reference"};
    const Tensors tensors{.q = {q.data(), {1, 3, 1, 1}},
                          .k = {k.data(), {1, 3, 1, 1}},
                          .v = {v.data(), {1, 3, 1, 1}},
                          .o = {o.data(), {1, 3, 1, 1}},
                          .beta = {beta.data(), {1, 3, 1}},
                          .g = {g.data(), {1, 3, 1}},
                          .initial_state = {initial.data(), {1, 1, 1, 1}},
                          .final_state = {final_state.data(), {1, 1, 1, 1}}};
    op == Op::forward ? forward(options, tensors) : decode(options, tensors);
    EXPECT_NEAR(o[0], 5, 1e-14);
    EXPECT_NEAR(o[1], 0, 1e-14);
    EXPECT_NEAR(o[2], 4, 1e-14);
    EXPECT_NEAR(final_state[0], 4, 1e-14);
  }
}

// K = V = 2, a decay per channel (1/2, 1/4), no initial state, scale 1, beta absent (1).
//   t0: k = (1, 0), v = (3, 4): S = [[3, 4], [0, 0]];            q = (1, 1): o = (3, 4)
//   t1: S' = [[3/2, 2], [0, 0]], k = (1, 1), S'^T k = (3/2, 2), v = (1, 1): u = (-1/2, -1)
//       S = [[1, 1], [-1/2, -1]];                                 q = (2, 1): o = (3/2, 1)
TEST(OracleByHand, TwoByTwoWithAGatePerChannel) {
  const double a = std::log(0.5), b = std::log(0.25);
  const std::vector<double> q{1, 1, 2, 1}, k{1, 0, 1, 1}, v{3, 4, 1, 1}, g{a, b, a, b};
  std::vector<double> o(4, NAN), final_state(4, NAN);
  forward({.scale = 1.0f, .impl = "reference"},
          {.q = {q.data(), {1, 2, 1, 2}},
           .k = {k.data(), {1, 2, 1, 2}},
           .v = {v.data(), {1, 2, 1, 2}},
           .o = {o.data(), {1, 2, 1, 2}},
           .g = {g.data(), {1, 2, 1, 2}},
           .final_state = {final_state.data(), {1, 1, 2, 2}}});
  const double want_o[] = {3, 4, 1.5, 1}, want_state[] = {1, 1, -0.5, -1};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(o[i], want_o[i], 1e-14) << i;
    EXPECT_NEAR(final_state[i], want_state[i], 1e-14) << i;
  }
}

// The default scale is K^-1/2; the norm is x / sqrt(sum x^2 + 1e-6).
TEST(OracleByHand, ScaleAndNorm) {
  const std::vector<double> q{3, 0, 0, 4}, k{0, 0, 0, 2}, v{7};
  std::vector<double> o(1, NAN);
  const Tensors tensors{.q = {q.data(), {1, 1, 1, 4}},
                        .k = {k.data(), {1, 1, 1, 4}},
                        .v = {v.data(), {1, 1, 1, 1}},
                        .o = {o.data(), {1, 1, 1, 1}}};
  forward({.impl = "reference"}, tensors);
  EXPECT_NEAR(o[0], 0.5 * 7 * 2 * 4, 1e-12);
  forward({.qk_l2norm = true, .impl = "reference"}, tensors);
  EXPECT_NEAR(o[0], 0.5 * 7 * (2 / std::sqrt(4 + 1e-6)) * (4 / std::sqrt(25 + 1e-6)), 1e-12);
}

// softplus: -exp(A_log) softplus(g + dt_bias); bounded: lower_bound sigmoid(exp(A_log) (g +
// dt_bias)).
TEST(OracleByHand, GateForms) {
  // Exact in fp32, as which the parameters are read.
  const std::vector<double> g{0.5}, A_log{0.25}, dt_bias{-0.125};
  std::vector<double> out(1, NAN);
  const BlockTensors tensors{.g = {g.data(), {1, 1, 1}},
                             .A_log = {A_log.data(), {1}},
                             .dt_bias = {dt_bias.data(), {1}},
                             .out = {out.data(), {1, 1, 1}}};
  gate({.gate_form = GateForm::softplus, .impl = "reference"}, tensors);
  EXPECT_NEAR(out[0], -std::exp(0.25) * std::log1p(std::exp(0.375)), 1e-12);
  gate({.gate_form = GateForm::bounded, .lower_bound = -5.0f, .impl = "reference"}, tensors);
  EXPECT_NEAR(out[0], -5 / (1 + std::exp(-std::exp(0.25) * 0.375)), 1e-12);
  BlockTensors plain = tensors;
  plain.A_log = {};
  gate({.gate_form = GateForm::bounded, .lower_bound = -5.0f, .impl = "reference"}, plain);
  EXPECT_NEAR(out[0], -5 / (1 + std::exp(-0.375)), 1e-12);
  plain.dt_bias = {};
  gate({.gate_form = GateForm::bounded, .lower_bound = -5.0f, .impl = "reference"}, plain);
  EXPECT_NEAR(out[0], -5 / (1 + std::exp(-0.5)), 1e-12);
}

TEST(OracleByHand, BetaForms) {
  const std::vector<double> one{1}, v{8}, beta{0.4};
  std::vector<double> o(1, NAN);
  const Tensors tensors{.q = {one.data(), {1, 1, 1, 1}},
                        .k = {one.data(), {1, 1, 1, 1}},
                        .v = {v.data(), {1, 1, 1, 1}},
                        .o = {o.data(), {1, 1, 1, 1}},
                        .beta = {beta.data(), {1, 1, 1}}};
  const double sigmoid = 1 / (1 + std::exp(-0.4));
  forward({.impl = "reference"}, tensors);
  EXPECT_NEAR(o[0], 8 * 0.4, 1e-12);
  forward({.beta_form = BetaForm::sigmoid, .impl = "reference"}, tensors);
  EXPECT_NEAR(o[0], 8 * sigmoid, 1e-12);
  forward({.beta_form = BetaForm::two_sigmoid, .impl = "reference"}, tensors);
  EXPECT_NEAR(o[0], 16 * sigmoid, 1e-12);
}

// Value head h reads q/k head h / (HV/H): heads 0, 1 read the first, 2, 3 the second.
TEST(OracleByHand, GroupedValues) {
  const std::vector<double> q{1, 10}, k{1, 1}, v{1, 2, 3, 4};
  std::vector<double> o(4, NAN);
  forward({.scale = 1.0f, .impl = "reference"}, {.q = {q.data(), {1, 1, 2, 1}},
                                                 .k = {k.data(), {1, 1, 2, 1}},
                                                 .v = {v.data(), {1, 1, 4, 1}},
                                                 .o = {o.data(), {1, 1, 4, 1}}});
  const double want[] = {1, 2, 30, 40};
  for (size_t h = 0; h < 4; ++h) EXPECT_NEAR(o[h], want[h], 1e-12) << h;
}

// decode's value-wise decay and vector beta: S' = exp(g) S Diag(exp(gv)), u = beta (v - S'^T k).
TEST(OracleByHand, ValueWiseDecayAndBeta) {
  const std::vector<double> one{1}, v{1, 1}, g{std::log(0.5)}, gv{0, std::log(0.25)}, beta{0.5, 1},
      initial{4, 8};
  std::vector<double> o(2, NAN);
  decode({.scale = 1.0f, .impl = "reference"}, {.q = {one.data(), {1, 1, 1, 1}},
                                                .k = {one.data(), {1, 1, 1, 1}},
                                                .v = {v.data(), {1, 1, 1, 2}},
                                                .o = {o.data(), {1, 1, 1, 2}},
                                                .beta = {beta.data(), {1, 1, 1, 2}},
                                                .g = {g.data(), {1, 1, 1}},
                                                .gv = {gv.data(), {1, 1, 1, 2}},
                                                .initial_state = {initial.data(), {1, 1, 1, 2}}});
  EXPECT_NEAR(o[0], 2 + 0.5 * (1 - 2), 1e-12);  // S' = 4/2
  EXPECT_NEAR(o[1], 1, 1e-12);                  // beta 1 writes v
}

// ---- A second route --------------------------------------------------------------------------

// S_t = (Diag(a) - beta k k^T Diag(a)) S_{t-1} + beta k v^T as literal matrices, in long double.
using Matrix = std::vector<std::vector<long double>>;

Matrix zeros(size_t rows, size_t columns) {
  return Matrix(rows, std::vector<long double>(columns, 0.0L));
}
Matrix times(const Matrix& a, const Matrix& b) {
  Matrix c = zeros(a.size(), b[0].size());
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < b[0].size(); ++j)
      for (size_t l = 0; l < b.size(); ++l) c[i][j] += a[i][l] * b[l][j];
  return c;
}

class OracleAgainstMatrices : public testing::TestWithParam<GateKind> {};

TEST_P(OracleAgainstMatrices, Agrees) {
  constexpr int64_t B = 2, T = 70, H = 2, HV = 4, K = 5, V = 3;
  const bool has_gate = GetParam() != GateKind::none, per_channel = GetParam() == GateKind::channel;
  std::vector<double> q, k, v, beta, g, initial;
  uint64_t n = 0;
  const auto fill = [&n](std::vector<double>& x, int64_t count, double scale, double shift) {
    for (int64_t i = 0; i < count; ++i) x.push_back(scale * normal(99, ++n) + shift);
  };
  fill(q, B * T * H * K, 1, 0);
  fill(k, B * T * H * K, 0.4, 0);
  fill(v, B * T * HV * V, 1, 0);
  fill(beta, B * T * HV, 0.2, 0.7);
  fill(initial, B * HV * K * V, 1, 0);
  for (int64_t i = 0; i < B * T * HV * (per_channel ? K : 1); ++i) {
    constexpr double kLevels[] = {0, -0.1, -5, -20};
    g.push_back(kLevels[i * 7 % 4] * uniform(98, static_cast<uint64_t>(i)));
  }
  std::vector<double> o(v.size(), NAN), final_state(initial.size(), NAN);
  Tensors tensors{.q = {q.data(), {B, T, H, K}},
                  .k = {k.data(), {B, T, H, K}},
                  .v = {v.data(), {B, T, HV, V}},
                  .o = {o.data(), {B, T, HV, V}},
                  .beta = {beta.data(), {B, T, HV}},
                  .initial_state = {initial.data(), {B, HV, K, V}},
                  .final_state = {final_state.data(), {B, HV, K, V}}};
  if (has_gate) tensors.g = {g.data(), {B, T, HV}};
  if (per_channel) tensors.g = {g.data(), {B, T, HV, K}};
  forward(kOracle, tensors);

  const long double scale = 1.0f / std::sqrt(static_cast<float>(K));
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < HV; ++h) {
      Matrix S = zeros(K, V);
      for (size_t d = 0; d < K; ++d)
        for (size_t c = 0; c < V; ++c)
          S[d][c] = initial[static_cast<size_t>((b * HV + h) * K * V) + d * V + c];
      for (int64_t t = 0; t < T; ++t) {
        const size_t key = static_cast<size_t>(((b * T + t) * H + h / (HV / H)) * K);
        const size_t row = static_cast<size_t>((b * T + t) * HV + h);
        Matrix transition = zeros(K, K), write = zeros(K, V);
        for (size_t i = 0; i < K; ++i) {
          for (size_t j = 0; j < K; ++j) {
            const long double decay =
                !has_gate ? 1.0L
                          : std::exp(static_cast<long double>(g[per_channel ? row * K + j : row]));
            transition[i][j] = ((i == j ? 1.0L : 0.0L) -
                                static_cast<long double>(beta[row]) * k[key + i] * k[key + j]) *
                               decay;
          }
          for (size_t c = 0; c < V; ++c)
            write[i][c] = static_cast<long double>(beta[row]) * k[key + i] * v[row * V + c];
        }
        S = times(transition, S);
        for (size_t i = 0; i < K; ++i)
          for (size_t c = 0; c < V; ++c) S[i][c] += write[i][c];
        for (size_t c = 0; c < V; ++c) {
          long double want = 0;
          for (size_t i = 0; i < K; ++i) want += scale * q[key + i] * S[i][c];
          ASSERT_NEAR(o[row * V + c], static_cast<double>(want), 1e-7 * (1 + std::fabs(want)))
              << b << " " << t << " " << h;
        }
      }
      for (size_t d = 0; d < K; ++d)
        for (size_t c = 0; c < V; ++c)
          ASSERT_NEAR(final_state[static_cast<size_t>((b * HV + h) * K * V) + d * V + c],
                      static_cast<double>(S[d][c]), 1e-12);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Gates, OracleAgainstMatrices,
                         testing::Values(GateKind::none, GateKind::head, GateKind::channel),
                         [](const auto& row) {
                           return std::string(row.param == GateKind::none   ? "none"
                                              : row.param == GateKind::head ? "head"
                                                                            : "channel");
                         });

// A packed call is its sequences; pools and checkpoints hold what the final states hold.
TEST(OracleStates, PackedPoolAndCheckpoints) {
  const Layer layer{.H = 1,
                    .HV = 2,
                    .K = 3,
                    .V = 4,
                    .dtype = DType::f64,
                    .gate_dtype = DType::f64,
                    .beta_dtype = DType::f64,
                    .state_dtype = DType::f64};
  const Batch batch{.sequences = {{.seed = 1, .length = 5, .checkpoints = {0, 2, 5}},
                                  {.seed = 2, .length = 0},
                                  {.seed = 3, .length = 9, .checkpoints = {4}}},
                    .padding = 2,
                    .pool = Pool::moved};
  for (Op op : {Op::forward, Op::decode}) {
    const Results packed = run(op, "reference", layer, batch);
    for (size_t n = 0; n < 3; ++n) {
      const Sequence& s = batch.sequences[n];
      const Results alone = run(op, "reference", layer, {.sequences = {s}});
      EXPECT_TRUE(packed[n].o == alone[0].o);
      EXPECT_TRUE(packed[n].final_state == alone[0].final_state);
      for (size_t i = 0; i < s.checkpoints.size(); ++i) {
        const Results part = run(op, "reference", layer,
                                 {.sequences = {{.seed = s.seed, .length = s.checkpoints[i]}}});
        EXPECT_TRUE(packed[n].checkpoints[i] == part[0].final_state) << n << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace deltic::test
