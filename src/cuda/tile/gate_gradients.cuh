// Gradients of the gate and beta forms, fp32.
#pragma once

#include "cuda/tile/gates.cuh"

namespace deltic::gpu {

// d(beta form)/dx * dy
__device__ inline float beta_gradient(deltic_beta_form form, float x, float dy) {
  if (form == DELTIC_BETA_VALUE) return dy;
  const float slope = sigmoid(x) * sigmoid(-x);
  return (form == DELTIC_BETA_2SIGMOID ? 2 * slope : slope) * dy;
}

struct GateGradient {
  float g, A_log;  // of the raw g, and of dt_bias; of A_log
};

// Of y = log_decay(form, lower_bound, g, exp(A_log), bias).
__device__ inline GateGradient log_decay_gradient(deltic_gate_form form, float lower_bound, float g,
                                                  float rate, float bias, float dy) {
  if (dy == 0) return {0, 0};  // a decay of 0 passes nothing on, and y may be infinite there
  const float x = g + bias;
  switch (form) {
    case DELTIC_GATE_SOFTPLUS:
      return {-rate * sigmoid(x) * dy, -rate * softplus(x) * dy};
    case DELTIC_GATE_BOUNDED: {
      const float slope = lower_bound * sigmoid(rate * x) * sigmoid(-rate * x);
      return {dy * slope * rate, dy * slope * rate * x};
    }
    default:
      return {dy, 0};
  }
}

}  // namespace deltic::gpu
