// Gate and beta forms, fp32, written so that no exponential overflows.
#pragma once

#include "core/problem.h"

namespace deltic::gpu {

// The quotient's divisor is 1 to 2: the approximate division is off by 2 units in the last place
// and, unlike the exact one, is no call.
__device__ inline float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return __fdividef(x >= 0 ? 1.0f : e, 1 + e);
}

__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// exp(A_log), from 80 on as of 80: infinity times a softplus or a g of 0 would be NaN, and so would
// sums of large products. The decay is the same but for raw gates below -75. NaN stays one.
__device__ inline float gate_rate(float A_log) { return expf(A_log > 80.0f ? 80.0f : A_log); }

// rate is gate_rate(A_log), or 1.
__device__ inline float log_decay(deltic_gate_form form, float lower_bound, float g, float rate,
                                  float bias) {
  switch (form) {
    case DELTIC_GATE_SOFTPLUS:
      return -rate * softplus(g + bias);
    case DELTIC_GATE_BOUNDED:
      return lower_bound * sigmoid(rate * (g + bias));
    default:
      return g;
  }
}

// A NaN stays one: fmaxf would hide it.
__device__ inline float clamp_log_decay(float g) { return g < kMinLogDecay ? kMinLogDecay : g; }
__device__ inline float decay_of(float g) { return expf(clamp_log_decay(g)); }

// Of neighbours, whose chains of instructions overlap: the form is looked at once.
template <int N>
__device__ void decays_of(deltic_gate_form form, float lower_bound, float rate, const float (&g)[N],
                          const float (&bias)[N], float (&decay)[N]) {
  const auto all = [&](deltic_gate_form known) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      decay[i] = decay_of(log_decay(known, lower_bound, g[i], rate, bias[i]));
    }
  };
  switch (form) {
    case DELTIC_GATE_SOFTPLUS:
      return all(DELTIC_GATE_SOFTPLUS);
    case DELTIC_GATE_BOUNDED:
      return all(DELTIC_GATE_BOUNDED);
    default:
      return all(DELTIC_GATE_LOG_DECAY);
  }
}

__device__ inline float beta_value(deltic_beta_form form, float x) {
  switch (form) {
    case DELTIC_BETA_SIGMOID:
      return sigmoid(x);
    case DELTIC_BETA_2SIGMOID:
      return 2 * sigmoid(x);
    default:
      return x;
  }
}

}  // namespace deltic::gpu
