// Numbers of a case's inputs.
#include "cases/draw.h"

#include <algorithm>
#include <cmath>

#include "cases/elements.h"

namespace deltic::cases {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double inverse_softplus(double y) {  // y > 0
  return y > 30.0 ? y : std::log(std::expm1(y));
}

// A log decay as the case asks for; `i` is the element, `h` its value head, `d` its channel or -1.
double draw_log_decay(const Case& c, const Random& random, const Random& pick, int64_t i, int64_t h,
                      int64_t d) {
  switch (c.gates) {
    case Gates::slow:
      if (h % 4 == 0 || (d >= 0 && d % 4 == 0)) return -1e-4 * pick.uniform(i, 0.5, 1.5);
      return -5.0 * sigmoid(random.normal(i));
    case Gates::softplus:
      return -(1.0 + 15.0 * Random(c.seed, "A").uniform(h)) * softplus(random.normal(i));
    case Gates::mixed: {
      constexpr double kLevels[] = {0.0, -5.0, -20.0, -1000.0};
      return kLevels[pick.bits(i) >> 62] * random.uniform(i, 0.9, 1.1);
    }
    case Gates::zero:
      return 0.0;
    case Gates::constant:
      return c.gate_value;
    default:
      return -5.0 * sigmoid(random.normal(i));
  }
}

// The raw g that a gate form turns into the log decay y; A = exp(A_log).
double invert_form(const Case& c, double y, double A, double bias) {
  if (c.form == GateForm::softplus) return inverse_softplus(std::max(-y / A, 1e-30)) - bias;
  if (c.form == GateForm::bounded) {
    const double r = std::clamp(y / c.lower_bound, 1e-7, 1.0 - 1e-7);
    return std::log(r / (1.0 - r)) / A - bias;
  }
  return y;
}

}  // namespace

// Keys [B,T,H,K], row-major: normalised unless the operation does it.
std::vector<double> draw_keys(const Case& c, bool normalised) {
  const int64_t rows = c.num_batches() * c.num_tokens() * c.H;
  std::vector<double> k(static_cast<size_t>(rows * c.K));
  const Random random(c.seed, "k"), base(c.seed, "k.base");
#pragma omp parallel for if (rows * c.K > kWorthThreads)
  for (int64_t r = 0; r < rows; ++r) {
    double* row = k.data() + r * c.K;
    const int64_t h = r % c.H, t = r / c.H % c.num_tokens();
    double sum = 0, base_sum = 0;
    for (int64_t d = 0; d < c.K; ++d) {
      row[d] = random.normal(r * c.K + d);
      sum += row[d] * row[d];
      const double b = base.normal(h * c.K + d);
      base_sum += b * b;
    }
    if (c.keys == Keys::repeated || c.keys == Keys::correlated) {
      // correlated: cosine about 0.96 between any two rows
      const double noise = c.keys == Keys::correlated ? 0.2 / std::sqrt(sum) : 0.0;
      sum = 0;
      for (int64_t d = 0; d < c.K; ++d) {
        row[d] = base.normal(h * c.K + d) / std::sqrt(base_sum) + noise * row[d];
        sum += row[d] * row[d];
      }
    }
    const bool is_zero = c.keys == Keys::zero && t % 3 == 1;
    const double factor = is_zero ? 0.0 : normalised ? 1.0 / std::sqrt(sum) : 1.0;
    for (int64_t d = 0; d < c.K; ++d) row[d] *= factor;
  }
  return k;
}

double draw_beta(const Case& c, const Random& random, int64_t i) {
  if (c.is_block()) return c.beta == Beta::two_sigmoid ? 2 * random.uniform(i) : random.uniform(i);
  if (c.beta == Beta::value) return random.uniform(i);
  return (c.beta == Beta::two_sigmoid ? 2.0 : 1.0) * random.normal(i);
}

std::vector<double> draw_queries(const Case& c) {
  const int64_t rows = c.num_batches() * c.num_tokens() * c.H;
  std::vector<double> q(static_cast<size_t>(rows * c.K));
  const Random random(c.seed, "q");
#pragma omp parallel for if (rows * c.K > kWorthThreads)
  for (int64_t i = 0; i < rows * c.K; ++i) {
    const int64_t t = i / c.K / c.H % c.num_tokens();
    q[static_cast<size_t>(i)] = c.keys == Keys::zero && t % 3 == 1 ? 0.0 : random.normal(i);
  }
  return q;
}

GateSource::GateSource(const Case& c, std::vector<double> A_log, std::vector<double> dt_bias)
    : c_(c),
      random_(c.seed, "g"),
      pick_(c.seed, "g.pick"),
      A_log_(std::move(A_log)),
      dt_bias_(std::move(dt_bias)),
      width_(c.gate == Gate::channel ? c.K : 1) {}

double GateSource::log_decay(int64_t i) const {
  return draw_log_decay(c_, random_, pick_, i, i / width_ % c_.HV,
                        c_.gate == Gate::channel ? i % width_ : -1);
}

double GateSource::raw(int64_t i) const {
  if (c_.gates == Gates::softplus && c_.form == GateForm::softplus) return random_.normal(i);
  const double A = A_log_.empty() ? 1.0 : std::exp(A_log_[static_cast<size_t>(i / width_ % c_.HV)]);
  const double bias = dt_bias_.empty() ? 0.0 : dt_bias_[static_cast<size_t>(i % (c_.HV * width_))];
  return invert_form(c_, log_decay(i), A, bias);
}

double draw_value_gate(const Case& c, const Random& random, const Random& pick, int64_t i) {
  return draw_log_decay(c, random, pick, i, i / c.V % c.HV, i % c.V);
}

namespace {

// One sequence and value head of a building block; `row(t)` is its row in [B,T,HV].
struct HeadOfBlock {
  const Case& c;
  BlockInputs& x;
  int64_t first, length, h, width;

  int64_t row(int64_t t) const { return (first + t) * c.HV + h; }
  double& G(int64_t t, int64_t d) const { return x.G[static_cast<size_t>(row(t) * width + d)]; }
  const double* k(int64_t t) const {
    return x.k.data() + ((first + t) * c.H + h / (c.HV / c.H)) * c.K;
  }

  void sum_gates(const GateSource& gates) const {
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t d = 0; d < width; ++d) {
        const double before = t % c.chunk == 0 ? 0.0 : G(t - 1, d);
        G(t, d) = before + std::max(-104.0, gates.log_decay(row(t) * width + d));
      }
    }
  }
  // Row i of beta * k k^T in the chunk that starts at token `begin`.
  void fill_products(int64_t begin, int64_t i, double beta, double* a) const {
    for (int64_t j = 0; j < i; ++j) {
      double sum = 0;
      for (int64_t d = 0; d < c.K; ++d) {
        const int64_t channel = c.gate == Gate::channel ? d : 0;
        const double gate = x.G.empty() ? 0.0 : G(begin + i, channel) - G(begin + j, channel);
        sum += k(begin + i)[d] * k(begin + j)[d] * std::exp(gate);
      }
      a[j] = beta * sum;
    }
  }
  // Turns row i of A into row i of (I + A)^-1: e_i - sum_j A_ij inverse_j, the rows before being
  // done.
  void invert_row(int64_t begin, int64_t i, double* a) const {
    std::vector<double> inverse(static_cast<size_t>(c.chunk), 0.0);
    for (int64_t j = 0; j < i; ++j) {
      const double* other = x.a.data() + row(begin + j) * c.chunk;
      for (int64_t m = 0; m <= j; ++m) inverse[static_cast<size_t>(m)] -= a[j] * other[m];
    }
    inverse[static_cast<size_t>(i)] = 1.0;
    std::copy(inverse.begin(), inverse.end(), a);
  }
};

}  // namespace

BlockInputs draw_block_inputs(const Case& c) {
  BlockInputs x;
  const bool is_gated = c.op != Op::inverse && c.gate != Gate::none;
  const bool has_a = c.op == Op::inverse || c.op == Op::wy;
  const int64_t rows = c.num_batches() * c.num_tokens() * c.HV, W = c.chunk;
  const int64_t width = c.gate == Gate::channel ? c.K : 1;
  x.k = draw_keys(c, true);
  x.G.assign(static_cast<size_t>(is_gated ? rows * width : 0), 0.0);
  x.a.assign(static_cast<size_t>(has_a ? rows * W : 0), 0.0);
  const GateSource gates(c, {}, {});
  const Random random_beta(c.seed, "beta");
#pragma omp parallel for schedule(dynamic) if (rows * std::max(width, W) > kWorthThreads)
  for (int64_t i = 0; i < c.num_sequences() * c.HV; ++i) {
    const int64_t n = i / c.HV;
    const HeadOfBlock head{
        c, x, c.packed ? c.sequence_begin(n) : n * c.length, c.sequence_length(n), i % c.HV, width};
    if (is_gated) head.sum_gates(gates);
    for (int64_t t = 0; has_a && t < head.length; ++t) {
      double* a = x.a.data() + head.row(t) * W;
      const double beta = c.beta == Beta::none ? 1.0 : draw_beta(c, random_beta, head.row(t));
      head.fill_products(t - t % W, t % W, beta, a);
      if (c.op == Op::wy || c.from_result) {
        head.invert_row(t - t % W, t % W, a);
      } else {
        std::fill(a + t % W, a + W, NAN);
      }
    }
  }
  return x;
}

}  // namespace deltic::cases
