// The forms of gate and beta, the L2 norm, and the derivatives of all three.
#pragma once

#include <cmath>

#include "reference/elements.h"

namespace deltic::reference {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
// sigmoid' = sigmoid(x) (1 - sigmoid(x)), and 1 - sigmoid(x) = sigmoid(-x)
inline double sigmoid_slope(double x) { return sigmoid(x) * sigmoid(-x); }

// ---- The gate ----

// What a gate's form needs besides g, of one value head and channel.
struct GateParameters {
  // From 600 on A_log counts as 600: the decay has long been 0 or 1, and 1e260 times any fp32
  // number is finite, so that no product below is inf * 0.
  GateParameters(const Problem& p, int64_t h, int64_t d)
      : exp_A_log(p.A_log ? std::exp(std::min(p.A_log[h], 600.0)) : 1),
        dt_bias(p.dt_bias ? p.dt_bias[h * gate_width(p) + d] : 0),
        lower_bound(p.lower_bound) {}
  double exp_A_log, dt_bias, lower_bound;
};

// The log decay of raw g.
inline double log_decay(const Problem& p, const GateParameters& gate, double g) {
  const double x = g + gate.dt_bias;
  switch (p.gate_form) {
    case DELTIC_GATE_SOFTPLUS:
      return -gate.exp_A_log * softplus(x);
    case DELTIC_GATE_BOUNDED:
      return gate.lower_bound * sigmoid(gate.exp_A_log * x);
    default:
      return g;
  }
}

struct GateSlopes {
  double g, A_log, dt_bias;
};

// The derivatives of log_decay.
inline GateSlopes log_decay_slopes(const Problem& p, const GateParameters& gate, double g) {
  const double x = g + gate.dt_bias;
  switch (p.gate_form) {
    case DELTIC_GATE_SOFTPLUS: {
      const double slope = -gate.exp_A_log * sigmoid(x);
      return {slope, -gate.exp_A_log * softplus(x), slope};
    }
    case DELTIC_GATE_BOUNDED: {
      const double z = gate.exp_A_log * x, outer = gate.lower_bound * sigmoid_slope(z);
      return {outer * gate.exp_A_log, outer * z, outer * gate.exp_A_log};
    }
    default:
      return {1, 0, 0};
  }
}

// The log decay of one token, value head and channel of a call with a gate.
inline double log_decay(const Problem& p, int64_t b, int64_t t, int64_t h, int64_t d) {
  return log_decay(p, GateParameters(p, h, d), get(p.g, b, t, h, d));
}

// dA_log [HV] and ddt_bias [HV, gate width], summed over the tokens of each sequence on its own and
// then over sequences in order: the result does not depend on the threads.
class ParameterSums {
 public:
  ParameterSums(const Problem& p, Scratch& scratch)
      : p_(p),
        A_log_(scratch, p.dA_log ? p.N : 0, p.HV),
        dt_bias_(scratch, p.ddt_bias ? p.N : 0, p.HV * gate_width(p)) {}

  void clear() {
    fill(A_log_, 0);
    fill(dt_bias_, 0);
  }
  // What a token of sequence n adds.
  void add(int64_t n, int64_t h, int64_t d, double dA_log, double ddt_bias) {
    if (p_.dA_log) A_log_(n, h) += dA_log;
    if (p_.ddt_bias) dt_bias_(n, h * gate_width(p_) + d) += ddt_bias;
  }
  void put_totals() const {
    const auto put_total = [](const Matrix& sums, const Param& out) {
      for (int64_t i = 0; i < sums.columns && out; ++i) {
        double total = 0;
        for (int64_t n = 0; n < sums.rows; ++n) total += sums(n, i);
        put(out, i, total);
      }
    };
    put_total(A_log_, p_.dA_log);
    put_total(dt_bias_, p_.ddt_bias);
  }

 private:
  const Problem& p_;
  Matrix A_log_, dt_bias_;  // [N, ...]
};

// d_log_decay of one token, value head and channel: dg of the raw value, and the parameters' share.
inline void put_gate_gradient(const Problem& p, const Sequence& s, int64_t t, int64_t h, int64_t d,
                              double d_log_decay, ParameterSums& sums) {
  const GateSlopes slopes =
      log_decay_slopes(p, GateParameters(p, h, d), get(p.g, s.batch, t, h, d));
  if (p.dg) put(p.dg, s.batch, t, h, d, slopes.g * d_log_decay);
  sums.add(s.n, h, d, slopes.A_log * d_log_decay, slopes.dt_bias * d_log_decay);
}

// ---- beta ----

// Of value column c; absent it is 1.
inline double beta(const Problem& p, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (p.beta_kind == BetaKind::none) return 1;
  const double x = get(p.beta, b, t, h, p.beta_kind == BetaKind::value ? c : 0);
  switch (p.beta_form) {
    case DELTIC_BETA_SIGMOID:
      return sigmoid(x);
    case DELTIC_BETA_2SIGMOID:
      return 2 * sigmoid(x);
    default:
      return x;
  }
}

// The derivative by the raw value x.
inline double beta_slope(const Problem& p, double x) {
  switch (p.beta_form) {
    case DELTIC_BETA_SIGMOID:
      return sigmoid_slope(x);
    case DELTIC_BETA_2SIGMOID:
      return 2 * sigmoid_slope(x);
    default:
      return 1;
  }
}

// ---- The L2 norm: y = x r with r = 1 / sqrt(sum x^2 + 1e-6) ----

inline double reciprocal_norm(const double* x, int64_t count) {
  return 1 / std::sqrt(dot(x, x, count) + kNormEps);
}
inline void normalize(double* x, int64_t count) {
  const double r = reciprocal_norm(x, count);
  for (int64_t i = 0; i < count; ++i) x[i] *= r;
}
// dr/dx = -r^3 x, hence dx = r dy - r^3 (x . dy) x; in place of dy.
inline void normalize_gradient(const double* x, double* dy, int64_t count) {
  const double r = reciprocal_norm(x, count), along = dot(x, dy, count);
  for (int64_t i = 0; i < count; ++i) dy[i] = r * dy[i] - r * r * r * along * x[i];
}

}  // namespace deltic::reference
