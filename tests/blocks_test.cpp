// The building blocks: each against its formula, and all together against the forward pass.
#include <gtest/gtest.h>

#include <cmath>

#include "support.h"

namespace deltic::test {
namespace {

constexpr int64_t H = 2, HV = 4, K = 24, V = 20;
const std::vector<int64_t> kOffsets{0, 70, 70, 71, 150};  // partial chunks, an empty sequence
constexpr int64_t T = 153;                                // three rows of padding

std::vector<std::string> names_of(Op op) { return runnable(op); }

// A tensor of fp32 numbers drawn from a seed.
Buffer drawn(std::vector<int64_t> shape, uint64_t seed, double scale, double shift = 0) {
  int64_t count = 1;
  for (int64_t n : shape) count *= n;
  Buffer b(DType::f32, std::move(shape));
  for (int64_t i = 0; i < count; ++i)
    b.set(i, scale * normal(seed, static_cast<uint64_t>(i)) + shift);
  return b;
}

// All that a chunked forward needs, packed.
struct Inputs {
  int32_t chunk;
  GateKind gate;
  Buffer q = drawn({1, T, H, K}, 1, 1);
  Buffer k = drawn({1, T, H, K}, 2, 0.2);
  Buffer v = drawn({1, T, HV, V}, 3, 1);
  Buffer beta = drawn({1, T, HV}, 4, 0.15, 0.5);
  Buffer g{}, cu{DType::i32, {static_cast<int64_t>(kOffsets.size())}};

  Inputs(int32_t chunk_length, GateKind kind) : chunk(chunk_length), gate(kind) {
    if (gate != GateKind::none) {
      g = gate == GateKind::head ? Buffer(DType::f32, {1, T, HV})
                                 : Buffer(DType::f32, {1, T, HV, K});
      constexpr double kLevels[] = {0, -0.1, -5, -60};
      for (int64_t i = 0; i < T * HV * (gate == GateKind::head ? 1 : K); ++i) {
        const auto u = static_cast<uint64_t>(i);
        g.set(i, kLevels[static_cast<int>(4 * uniform(5, u))] * (0.9 + 0.2 * uniform(6, u)));
      }
    }
    for (size_t i = 0; i < kOffsets.size(); ++i) cu.set_index(static_cast<int64_t>(i), kOffsets[i]);
  }
  int64_t gate_width() const { return gate == GateKind::channel ? K : 1; }
  double decay(int64_t t, int64_t h, int64_t d) const {
    return gate == GateKind::none   ? 0
           : gate == GateKind::head ? g.get(t * HV + h)
                                    : g.get((t * HV + h) * K + d);
  }
};

// A chunk of a packed sequence: tokens [begin, begin + length).
struct Chunk {
  int64_t begin, length;
};
std::vector<Chunk> chunks(int32_t width) {
  std::vector<Chunk> all;
  for (size_t n = 0; n + 1 < kOffsets.size(); ++n)
    for (int64_t t = kOffsets[n]; t < kOffsets[n + 1]; t += width)
      all.push_back({t, std::min<int64_t>(width, kOffsets[n + 1] - t)});
  return all;
}

Buffer output(std::vector<int64_t> shape) { return Buffer(DType::f32, std::move(shape)); }

void expect_near(double got, double want, const std::string& what) {
  ASSERT_NEAR(got, want, 2e-5 * (1 + std::fabs(want))) << what;
}

// Cumulative sums by the formula.
std::vector<double> sums(const Inputs& in, bool reverse = false) {
  std::vector<double> G(static_cast<size_t>(T * HV * in.gate_width()), 0.0);
  for (const Chunk& c : chunks(in.chunk)) {
    for (int64_t h = 0; h < HV; ++h) {
      for (int64_t d = 0; d < in.gate_width(); ++d) {
        double sum = 0;
        for (int64_t i = 0; i < c.length; ++i) {
          const int64_t t = c.begin + (reverse ? c.length - 1 - i : i);
          sum += in.decay(t, h, d);
          G[static_cast<size_t>((t * HV + h) * in.gate_width() + d)] = sum;
        }
      }
    }
  }
  return G;
}

struct Row {
  int32_t chunk;
  GateKind gate;
  int32_t threads;
};
std::string name_of(const Row& r) {
  constexpr const char* kNames[] = {"none", "head", "channel"};
  return std::string(kNames[static_cast<int>(r.gate)]) + "_" + std::to_string(r.chunk);
}

class Blocks : public testing::TestWithParam<Row> {
 protected:
  Inputs in_{GetParam().chunk, GetParam().gate};
  Options options(const std::string& impl) const {
    return {.chunk = GetParam().chunk, .num_threads = GetParam().threads, .impl = impl};
  }
  Buffer G(const std::string& impl) const {
    if (GetParam().gate == GateKind::none) return {};
    Buffer out = GetParam().gate == GateKind::head ? output({1, T, HV}) : output({1, T, HV, K});
    cumsum(options(impl), {.g = in_.g.view(), .cu_seqlens = in_.cu.view(), .out = out.view()});
    return out;
  }
  std::vector<int64_t> scores_shape() const { return {1, T, HV, GetParam().chunk}; }
};

TEST_P(Blocks, CumulativeSum) {
  if (GetParam().gate == GateKind::none) GTEST_SKIP() << "no gate";
  for (const std::string& impl : names_of(Op::cumsum)) {
    for (bool reverse : {false, true}) {
      Buffer out = GetParam().gate == GateKind::head ? output({1, T, HV}) : output({1, T, HV, K});
      Options o = options(impl);
      o.reverse = reverse;
      o.scale = 2.0f;
      cumsum(o, {.g = in_.g.view(), .cu_seqlens = in_.cu.view(), .out = out.view()});
      EXPECT_TRUE(out.sentinels_intact());
      const auto want = sums(in_, reverse);
      for (size_t i = 0; i < want.size(); ++i)
        expect_near(out.get(static_cast<int64_t>(i)), 2 * want[i],
                    impl + " at " + std::to_string(i));
    }
  }
}

TEST_P(Blocks, KeyProducts) {
  const auto sum = sums(in_);
  for (const std::string& impl : names_of(Op::kkt)) {
    const Buffer gate = G(impl), out = output(scores_shape());
    kkt(options(impl), {.k = in_.k.view(),
                        .g = gate.view(),
                        .beta = in_.beta.view(),
                        .cu_seqlens = in_.cu.view(),
                        .out = out.view()});
    EXPECT_TRUE(out.sentinels_intact());
    for (const Chunk& c : chunks(in_.chunk)) {
      for (int64_t h = 0; h < HV; ++h) {
        for (int64_t i = 0; i < c.length; ++i) {
          for (int64_t j = 0; j < in_.chunk; ++j) {
            double want = 0;
            for (int64_t d = 0; d < K && j < i; ++d) {
              const int64_t ti = c.begin + i, tj = c.begin + j, kh = h / (HV / H);
              const int64_t w = in_.gate_width();
              const double Gi = sum[size_t((ti * HV + h) * w + (w > 1 ? d : 0))];
              const double Gj = sum[size_t((tj * HV + h) * w + (w > 1 ? d : 0))];
              want += in_.k.get((ti * H + kh) * K + d) * in_.k.get((tj * H + kh) * K + d) *
                      std::exp(Gi - Gj);
            }
            want *= in_.beta.get((c.begin + i) * HV + h);
            const double got = out.get(((c.begin + i) * HV + h) * in_.chunk + j);
            if (j >= i) {
              ASSERT_EQ(got, 0.0) << impl << ": not strictly lower";
            } else {
              expect_near(got, want, impl);
            }
          }
        }
      }
    }
    for (int64_t i = kOffsets.back() * HV * in_.chunk; i < T * HV * in_.chunk; ++i)
      ASSERT_EQ(out.get(i), 0.0) << impl << ": padding";
  }
}

TEST_P(Blocks, Inverse) {
  // Entries on and above the diagonal, past a partial chunk and in the padding are never read.
  Buffer a(DType::f32, scores_shape());
  for (const Chunk& c : chunks(in_.chunk))
    for (int64_t i = 0; i < c.length; ++i)
      for (int64_t h = 0; h < HV; ++h)
        for (int64_t j = 0; j < i; ++j) {
          const int64_t at = ((c.begin + i) * HV + h) * in_.chunk + j;
          a.set(at, 0.3 * normal(17, static_cast<uint64_t>(at)));
        }
  for (const std::string& impl : names_of(Op::inverse)) {
    const Buffer out = output(scores_shape());
    inverse(options(impl), {.a = a.view(), .cu_seqlens = in_.cu.view(), .out = out.view()});
    EXPECT_TRUE(out.sentinels_intact());
    for (const Chunk& c : chunks(in_.chunk)) {
      for (int64_t h = 0; h < HV; ++h) {
        const auto at = [&](int64_t i, int64_t j) {
          return ((c.begin + i) * HV + h) * in_.chunk + j;
        };
        for (int64_t i = 0; i < c.length; ++i) {
          for (int64_t j = 0; j < in_.chunk; ++j) {
            if (j >= i) {
              ASSERT_EQ(out.get(at(i, j)), i == j ? 1.0 : 0.0) << impl << " " << i << " " << j;
              continue;
            }
            double product = out.get(at(i, j)), size = std::fabs(product);  // (I + A) X = I
            for (int64_t l = j; l < i; ++l) {
              product += a.get(at(i, l)) * out.get(at(l, j));
              size += std::fabs(a.get(at(i, l)) * out.get(at(l, j)));
            }
            ASSERT_NEAR(product, 0.0, 1e-5 * (1 + size)) << impl << " " << i << " " << j;
          }
        }
      }
    }
    for (int64_t i = kOffsets.back() * HV * in_.chunk; i < T * HV * in_.chunk; ++i)
      ASSERT_EQ(out.get(i), 0.0) << impl << ": padding";
  }
}

// One pass gives the bits of three.
TEST_P(Blocks, ScoresInverse) {
  for (const std::string& impl : names_of(Op::scores_inverse)) {
    const Buffer gate = G(impl), L = output(scores_shape()), X = output(scores_shape()),
                 P = output(scores_shape()), both_X = output(scores_shape()),
                 both_P = output(scores_shape());
    const TensorView cu = in_.cu.view();
    BlockTensors t{.q = in_.q.view(),
                   .k = in_.k.view(),
                   .g = gate.view(),
                   .beta = in_.beta.view(),
                   .a = both_X.view(),
                   .cu_seqlens = cu,
                   .out = both_P.view()};
    scores_inverse(options(impl), t);
    EXPECT_TRUE(both_X.sentinels_intact() && both_P.sentinels_intact());
    t.a = {}, t.beta = {}, t.out = P.view();
    scores(options(impl), t);
    t.q = {}, t.beta = in_.beta.view(), t.out = L.view();
    kkt(options(impl), t);
    inverse(options(impl), {.a = L.view(), .cu_seqlens = cu, .out = X.view()});
    // The oracle does not round to fp32 in between.
    const double tolerance = impl == "reference" ? 1e-6 : 0;
    for (int64_t i = 0; i < T * HV * in_.chunk; ++i) {
      ASSERT_EQ(both_P.get(i), P.get(i)) << impl << " scores " << i;
      ASSERT_NEAR(both_X.get(i), X.get(i), tolerance) << impl << " inverse " << i;
    }
  }
}

// Section by section as the chunked form has it: the blocks give w, u, kg, qg and the scores; what
// is left are three products with the state.
TEST_P(Blocks, TogetherTheyAreTheForwardPass) {
  const auto N = static_cast<int64_t>(kOffsets.size()) - 1;
  Buffer initial = drawn({N, HV, K, V}, 7, 0.5);
  Buffer want_o = output({1, T, HV, V}), want_state = output({N, HV, K, V});
  forward({.chunk = GetParam().chunk, .impl = "reference"}, {.q = in_.q.view(),
                                                             .k = in_.k.view(),
                                                             .v = in_.v.view(),
                                                             .o = want_o.view(),
                                                             .beta = in_.beta.view(),
                                                             .g = in_.g.view(),
                                                             .cu_seqlens = in_.cu.view(),
                                                             .initial_state = initial.view(),
                                                             .final_state = want_state.view()});
  for (const std::string& impl : names_of(Op::wy)) {
    const Buffer gate = G(impl), A = output(scores_shape()), X = output(scores_shape()),
                 P = output(scores_shape()), w = output({1, T, HV, K}), u = output({1, T, HV, V}),
                 kg = output({1, T, HV, K}), qg = output({1, T, HV, K});
    const TensorView cu = in_.cu.view();
    kkt(options(impl), {.k = in_.k.view(),
                        .g = gate.view(),
                        .beta = in_.beta.view(),
                        .cu_seqlens = cu,
                        .out = A.view()});
    inverse(options(impl), {.a = A.view(), .cu_seqlens = cu, .out = X.view()});
    scores(options(impl), {.q = in_.q.view(),
                           .k = in_.k.view(),
                           .g = gate.view(),
                           .cu_seqlens = cu,
                           .out = P.view()});
    wy(options(impl), {.q = in_.q.view(),
                       .k = in_.k.view(),
                       .v = in_.v.view(),
                       .g = gate.view(),
                       .beta = in_.beta.view(),
                       .a = X.view(),
                       .cu_seqlens = cu,
                       .w = w.view(),
                       .u = u.view(),
                       .kg = kg.view(),
                       .qg = qg.view()});
    const double scale = 1 / std::sqrt(static_cast<double>(K));
    double difference = 0, size = 0;
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t h = 0; h < HV; ++h) {
        std::vector<double> S(size_t(K * V));
        for (int64_t i = 0; i < K * V; ++i) S[size_t(i)] = initial.get((n * HV + h) * K * V + i);
        for (int64_t begin = kOffsets[size_t(n)]; begin < kOffsets[size_t(n) + 1];
             begin += in_.chunk) {
          const int64_t length = std::min<int64_t>(in_.chunk, kOffsets[size_t(n) + 1] - begin);
          std::vector<double> fresh(size_t(length * V));
          for (int64_t i = 0; i < length; ++i) {
            const int64_t row = (begin + i) * HV + h;
            for (int64_t c = 0; c < V; ++c) {
              double x = u.get(row * V + c);
              for (int64_t d = 0; d < K; ++d) x -= w.get(row * K + d) * S[size_t(d * V + c)];
              fresh[size_t(i * V + c)] = x;
            }
          }
          for (int64_t i = 0; i < length; ++i) {
            const int64_t row = (begin + i) * HV + h;
            for (int64_t c = 0; c < V; ++c) {
              double x = 0;
              for (int64_t d = 0; d < K; ++d)
                x += scale * qg.get(row * K + d) * S[size_t(d * V + c)];
              for (int64_t j = 0; j <= i; ++j)
                x += P.get(row * in_.chunk + j) * fresh[size_t(j * V + c)];
              const double want = want_o.get(row * V + c);
              difference += (x - want) * (x - want);
              size += want * want;
            }
          }
          for (int64_t d = 0; d < K; ++d) {
            double total = 0;
            for (int64_t i = 0; i < length; ++i) total += in_.decay(begin + i, h, d);
            for (int64_t c = 0; c < V; ++c) {
              double x = std::exp(total) * S[size_t(d * V + c)];
              for (int64_t i = 0; i < length; ++i)
                x += kg.get(((begin + i) * HV + h) * K + d) * fresh[size_t(i * V + c)];
              S[size_t(d * V + c)] = x;
            }
          }
        }
        for (int64_t i = 0; i < K * V; ++i)
          expect_near(S[size_t(i)], want_state.get((n * HV + h) * K * V + i), impl + ": state");
      }
    }
    EXPECT_LE(std::sqrt(difference / size), 1e-4) << impl;
    for (const Buffer* b : {&w, &u, &kg, &qg, &P}) EXPECT_TRUE(b->sentinels_intact()) << impl;
    for (int64_t i = kOffsets.back() * HV * K; i < T * HV * K; ++i)
      ASSERT_EQ(w.get(i), 0.0) << impl << ": padding";
  }
}

TEST_P(Blocks, ThreadsChangeNoBit) {
  for (const std::string& impl : names_of(Op::kkt)) {
    const Buffer gate = G(impl);
    std::vector<uint8_t> first;
    for (int32_t threads : {1, 2, 3, 5}) {
      const Buffer out = output(scores_shape());
      Options o = options(impl);
      o.num_threads = threads;
      kkt(o, {.k = in_.k.view(),
              .g = gate.view(),
              .beta = in_.beta.view(),
              .cu_seqlens = in_.cu.view(),
              .out = out.view()});
      if (threads == 1) first = out.all_bytes();
      EXPECT_TRUE(out.all_bytes() == first) << impl << " " << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Blocks,
                         testing::Values(Row{16, GateKind::none, 1}, Row{16, GateKind::head, 2},
                                         Row{16, GateKind::channel, 1}, Row{32, GateKind::none, 2},
                                         Row{32, GateKind::channel, 1}, Row{64, GateKind::none, 1},
                                         Row{64, GateKind::head, 2}, Row{64, GateKind::channel, 2}),
                         [](const auto& row) { return name_of(row.param); });

TEST(Norm, DividesByTheLength) {
  const Buffer x = drawn({2, 5, 3, 17}, 8, 3);
  for (const std::string& impl : names_of(Op::l2norm)) {
    const Buffer out = output({2, 5, 3, 17}), rstd = output({2, 5, 3});
    l2norm({.impl = impl}, {.x = x.view(), .out = out.view(), .rstd = rstd.view()});
    for (int64_t row = 0; row < 30; ++row) {
      double sum = 1e-6;
      for (int64_t c = 0; c < 17; ++c) sum += x.get(row * 17 + c) * x.get(row * 17 + c);
      expect_near(rstd.get(row), 1 / std::sqrt(sum), impl);
      for (int64_t c = 0; c < 17; ++c)
        expect_near(out.get(row * 17 + c), x.get(row * 17 + c) / std::sqrt(sum), impl);
    }
    EXPECT_TRUE(out.sentinels_intact() && rstd.sentinels_intact()) << impl;
  }
}

TEST(Norm, ZeroRowsStayZero) {
  Buffer x(DType::bf16, {1, 3, 1, 8});
  for (int64_t i = 0; i < 24; ++i) x.set(i, 0);
  for (const std::string& impl : names_of(Op::l2norm)) {
    const Buffer out(DType::f16, {1, 3, 1, 8});
    l2norm({.impl = impl}, {.x = x.view(), .out = out.view()});
    for (int64_t i = 0; i < 24; ++i) ASSERT_EQ(out.get(i), 0.0) << impl;
  }
}

// A log decay counts as -104 at the least: what is below would cost the sums after it their digits.
TEST(GateForms, SumsHaveTheBound) {
  constexpr double kGates[] = {-0.5, -1000, -103, -105, 2, -1e30};
  constexpr double kSums[] = {-0.5, -104.5, -207.5, -311.5, -309.5, -413.5};
  for (const int64_t width : {0, 3}) {
    std::vector<int64_t> shape{1, 6, 1};
    if (width > 0) shape.push_back(width);
    Buffer g(DType::f32, shape);
    const int64_t columns = std::max<int64_t>(width, 1);
    for (int64_t i = 0; i < 6 * columns; ++i) g.set(i, kGates[i / columns]);
    for (const std::string& impl : names_of(Op::cumsum)) {
      const Buffer out = output(shape);
      cumsum({.impl = impl}, {.g = g.view(), .out = out.view()});
      for (int64_t i = 0; i < 6 * columns; ++i)
        EXPECT_FLOAT_EQ(static_cast<float>(out.get(i)), static_cast<float>(kSums[i / columns]))
            << impl << " at " << i;
    }
  }
}

// The sum of the gate's form is the form, then the sum.
TEST(GateForms, FusedSumIsFormThenSum) {
  for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
    for (const std::string& impl : names_of(Op::cumsum)) {
      const Buffer g = drawn({1, 40, 3, 5}, 12, 2), A_log = drawn({3}, 13, 0.3),
                   bias = drawn({3, 5}, 14, 1);
      const Buffer gates = output({1, 40, 3, 5}), apart = output({1, 40, 3, 5}),
                   fused = output({1, 40, 3, 5});
      Options o{.gate_form = form, .chunk = 16, .impl = impl};
      if (form == GateForm::bounded) o.lower_bound = -4.0f;
      const BlockTensors in{.g = g.view(), .A_log = A_log.view(), .dt_bias = bias.view()};
      BlockTensors t = in;
      t.out = gates.view();
      gate(o, t);
      for (int64_t i = 0; i < 600; ++i) {
        const int64_t h = i / 5 % 3;
        const double x = g.get(i) + bias.get(h * 5 + i % 5), a = std::exp(A_log.get(h));
        const double want = form == GateForm::softplus ? -a * std::log1p(std::exp(x))
                                                       : -4.0 / (1 + std::exp(-a * x));
        expect_near(gates.get(i), want, impl);
      }
      cumsum({.chunk = 16, .impl = impl}, {.g = gates.view(), .out = apart.view()});
      t.out = fused.view();
      cumsum(o, t);
      for (int64_t i = 0; i < 600; ++i) expect_near(fused.get(i), apart.get(i), impl);
    }
  }
}

// exp(A_log) leaves fp32 at 88.7, long before the log decay does where g is below -A_log, or 0 in
// the bounded form. One value head for every pair; the gradients too, where they are in fp32's
// range.
TEST(GateForms, HugeRates) {
  std::vector<float> A_log, g;
  for (float a : {30.0f, 59.0f, 61.0f, 80.0f, 88.5f, 89.0f, 100.0f, 300.0f, 590.0f, 1e30f}) {
    for (float x : {-2 * a, -a - 5, -a - 1, -a, -a + 1, -a + 4, -20.0f, -1e-30f, 0.0f, 1.0f}) {
      A_log.push_back(a), g.push_back(x);
    }
  }
  const auto heads = static_cast<int64_t>(g.size());
  const std::vector<float> ones(g.size(), 1);
  struct Run {
    explicit Run(size_t n) : out(n), sum(n), dg(n), dA_log(n) {}
    std::vector<float> out, sum, dg, dA_log;
  };
  for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
    const auto run = [&](const std::string& impl) {
      Run r(g.size());
      Options o{.gate_form = form, .impl = impl};
      if (form == GateForm::bounded) o.lower_bound = -5.0f;
      const auto view = [&](const std::vector<float>& x) {
        return TensorView{x.data(), {1, 1, heads}};
      };
      const BlockTensors in{.g = view(g), .A_log = {A_log.data(), {heads}}};
      BlockTensors t = in;
      t.out = view(r.out);
      gate(o, t);
      t.out = view(r.sum);
      cumsum(o, t);
      block_backward(Op::gate, o,
                     {.forward = in,
                      .d_out = view(ones),
                      .dg = view(r.dg),
                      .dA_log = {r.dA_log.data(), {heads}}});
      return r;
    };
    const Run want = run("reference");
    for (const std::string& impl : names_of(Op::gate)) {
      const Run got = run(impl);
      for (size_t i = 0; i < g.size(); ++i) {
        const auto expect_same = [&](float x, float ref, const char* what) {
          EXPECT_FALSE(std::isnan(x)) << impl << " " << what << " " << A_log[i] << " " << g[i];
          if (x == ref || A_log[i] > 600) return;  // infinite both; past the oracle's own range
          EXPECT_LE(std::fabs(double{x} - double{ref}), 1e-4 * std::fabs(double{ref}) + 1e-9)
              << impl << " " << what << " A_log " << A_log[i] << " g " << g[i] << ": " << x
              << ", expected " << ref;
        };
        expect_same(got.out[i], want.out[i], "gate");
        expect_same(got.sum[i], want.sum[i], "cumsum");
        expect_same(got.dg[i], want.dg[i], "dg");
        expect_same(got.dA_log[i], want.dA_log[i], "dA_log");
      }
    }
  }
}

// Squares of large numbers overflow fp32, their norm does not.
TEST(Norm, LargeNumbers) {
  const std::vector<float> x{1e20f, 2e20f, 0, 0};
  for (const std::string& impl : runnable(Op::l2norm)) {
    std::vector<float> y(4);
    l2norm({.impl = impl}, {.x = {x.data(), {1, 1, 1, 4}}, .out = {y.data(), {1, 1, 1, 4}}});
    EXPECT_NEAR(y[0], 1 / std::sqrt(5.0), 1e-6) << impl;
    EXPECT_NEAR(y[1], 2 / std::sqrt(5.0), 1e-6) << impl;
  }
}

// The oracle reads fp64 parameters as they are.
TEST(Gate, OracleTakesParametersInFp64) {
  const double A_log = 0.1234567890123, bias = 1.0 / 3, g = 0.7;
  double out = 0;
  gate({.gate_form = GateForm::softplus, .impl = "reference"}, {.g = {&g, {1, 1, 1}},
                                                                .A_log = {&A_log, {1}},
                                                                .dt_bias = {&bias, {1}},
                                                                .out = {&out, {1, 1, 1}}});
  EXPECT_NEAR(out, -std::exp(A_log) * std::log1p(std::exp(g + bias)), 1e-15);
}

}  // namespace
}  // namespace deltic::test
