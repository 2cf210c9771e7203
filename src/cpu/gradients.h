// Gradients of a call's edges in fp32: the L2 norm, the beta and gate forms, and what has to be
// zero.
#pragma once

#include <cstdint>

#include "cpu/recurrence.h"

namespace deltic {

// How much of y is taken off dy, see below.
inline double norm_gradient_along(double dot, double squares, double r) {
  return squares == 0 ? 0 : dot / squares * (1 - kNormEps * r * r);
}

// y = s r x with r = 1 / sqrt(sum x^2 + 1e-6) and any factor s; dy becomes dx / s. With p the part
// of dy along y, dx / s = r ((dy - p) + 1e-6 r^2 p), finite at x = 0. The textbook's dy - y (y .
// dy) is the same where y . y is 1 - 1e-6 r^2, but a rounded y is off by 6e-8: 6 % of what is left
// of a dy along y, and for a key of one channel nothing else is. Hence p by the y there is, and in
// double.
inline void normalize_gradient(const float* y, float r, int64_t count, float* dy) {
  double dot = 0, squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    dot += static_cast<double>(y[i]) * dy[i];
    squares += static_cast<double>(y[i]) * y[i];
  }
  const double along = norm_gradient_along(dot, squares, r);
  for (int64_t i = 0; i < count; ++i) dy[i] = r * static_cast<float>(dy[i] - along * y[i]);
}

// d(beta form)/dx * dy
inline float beta_gradient(const Problem& p, float x, float dy) {
  switch (p.beta_form) {
    case DELTIC_BETA_SIGMOID:
      return sigmoid(x) * sigmoid(-x) * dy;
    case DELTIC_BETA_2SIGMOID:
      return 2 * sigmoid(x) * sigmoid(-x) * dy;
    default:
      return dy;
  }
}

struct GateGradient {
  float g = 0;      // of the raw g, and of dt_bias
  float A_log = 0;  // of A_log
};

// Of y = log_decay(p, g, rate, bias).
inline GateGradient log_decay_gradient(const Problem& p, float g, const GateRate& rate, float bias,
                                       float dy) {
  if (dy == 0) return {};  // a decay of 0 passes nothing on, and y may be infinite there
  const float x = g + bias;
  switch (p.gate_form) {
    case DELTIC_GATE_SOFTPLUS: {
      // sigmoid(x) = exp(-softplus(-x))
      const float slope =
          rate.is_huge() ? std::exp(rate.log - softplus(-x)) : rate.value * sigmoid(x);
      return {-slope * dy, -times_softplus(rate, x) * dy};
    }
    case DELTIC_GATE_BOUNDED: {
      const float z = times_rate(rate, x), outer = p.lower_bound * dy;
      const float slope = sigmoid(z) * sigmoid(-z);
      const float inner =
          rate.is_huge() ? std::exp(rate.log - softplus(z) - softplus(-z)) : slope * rate.value;
      return {outer * inner, outer * slope * z};
    }
    default:
      return {dy, 0};
  }
}

// Gradients of rows that belong to no sequence.
inline void zero_gradient_padding(const Problem& p) {
  zero_padding(p, p.dq, p.H, p.K);
  zero_padding(p, p.dk, p.H, p.K);
  zero_padding(p, p.dv, p.HV, p.V);
  zero_padding(p, p.dbeta, p.HV, beta_width(p));
  zero_padding(p, p.dgv, p.HV, p.V);
  zero_padding(p, p.dg, p.HV, gate_width(p));
  zero_padding(p, p.dx, p.H, p.K);
  zero_padding(p, p.da, p.HV, p.chunk);
}

// ---- dA_log and ddt_bias ----
// Sums over tokens are in fp64, one set per sequence and value head, added in the order of the
// sequences: the result depends neither on the threads nor, over a million tokens, on rounding.

inline bool wants_parameter_sums(const Problem& p) { return p.dA_log || p.ddt_bias; }
// One for A_log, then those of dt_bias.
inline int64_t parameter_sums_per_head(const Problem& p) {
  return wants_parameter_sums(p) ? 1 + gate_width(p) : 0;
}
inline int64_t num_parameter_sums(const Problem& p) {
  return p.N * p.HV * parameter_sums_per_head(p);
}

// sums: [N, HV, parameter_sums_per_head]
inline void store_parameter_gradients(const Problem& p, const double* sums) {
  if (!wants_parameter_sums(p)) return;
  const int64_t count = parameter_sums_per_head(p);
  const auto total = [&](int64_t h, int64_t i) {
    double sum = 0;
    for (int64_t n = 0; n < p.N; ++n) sum += sums[(n * p.HV + h) * count + i];
    return sum;
  };
  for (int64_t h = 0; h < p.HV; ++h) {
    if (p.dA_log) store(p.dA_log.data, p.dA_log.dtype, p.dA_log.at(h), total(h, 0));
    for (int64_t d = 0; d < gate_width(p) && p.ddt_bias; ++d) {
      store(p.ddt_bias.data, p.ddt_bias.dtype, p.ddt_bias.at(h * gate_width(p) + d),
            total(h, 1 + d));
    }
  }
}

}  // namespace deltic
