// Activations of the operations beside the delta rule, and their slopes. The approximate
// exponential and reciprocal are off by a few units in the last place of fp32; no input makes an
// intermediate number that is not finite matter.
#pragma once

#include "core/problem.h"
#include "cuda/ptx/numbers.cuh"

namespace deltic::gpu {

// 1 / (1 + exp(-x)): the exponential is infinite below -88, and the result 0.
__device__ inline float logistic(float x) {
  constexpr float kLog2e = 1.4426950408889634f;
  return rcp_approx(1.0f + exp2_approx(-kLog2e * x));
}
__device__ inline float silu(float x) { return x * logistic(x); }
__device__ inline float silu_slope(float x) {
  const float s = logistic(x);
  return s * fmaf(x, 1.0f - s, 1.0f);
}

// An activation that the call names.
struct Activated {
  float value, slope;
};
__device__ inline Activated activate(deltic_activation form, float x) {
  if (form == DELTIC_ACTIVATION_NONE) return {x, 1.0f};
  const float s = logistic(x), rest = 1.0f - s;
  if (form == DELTIC_ACTIVATION_SIGMOID) return {s, s * rest};
  return {x * s, s * fmaf(x, rest, 1.0f)};
}

}  // namespace deltic::gpu
