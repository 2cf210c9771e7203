// Gates and beta of a token by approximate instructions: per head as base-2 logarithms, per channel
// as decays.
#pragma once
#include "cuda/ptx/numbers.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/tile/gates.cuh"

namespace deltic::gpu::forward {

__device__ inline float beta_value(const Params& p, float x) {
  return p.has_sigmoid ? p.beta_scale * rcp_approx(1.f + exp2_approx(-x * kLog2e)) : x;
}
// log2 of a decay per head.
__device__ inline float head_decay(const Params& p, float x, int head) {
  const float rate = p.a_log.data ? gate_rate(load_number(p.a_log.data, p.a_log.type, head)) : 1.f;
  if (p.dt_bias.data) x += load_number(p.dt_bias.data, p.dt_bias.type, head);
  if (p.form == GateForm::kBounded) {
    x = p.lower_bound * kLog2e * rcp_approx(1.f + exp2_approx(-rate * kLog2e * x));
  } else {
    x *= kLog2e;
    if (p.form == GateForm::kSoftplus)
      x = -rate * (fmaxf(x, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(x))));
  }
  return x < -151.f ? -151.f : x;  // 2^-151 is 0; the sums keep their precision; NaN stays
}
// exp(g) from raw g, one channel. slope and bias carry log2(e).
template <GateForm kForm>
__device__ inline float decay_of(float raw, float slope, float bias, float bound) {
  if constexpr (kForm == GateForm::kBounded) {  // 2^inf = inf, 1/inf = 0: no clamp needed
    return exp2_approx(bound * rcp_approx(1.f + exp2_approx(fmaf(raw, slope, bias))));
  } else if constexpr (kForm == GateForm::kSoftplus) {
    const float y = fmaf(raw, kLog2e, bias);
    return exp2_approx(slope * (fmaxf(y, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(y)))));
  } else {
    return exp2_approx(raw * kLog2e);
  }
}

}  // namespace deltic::gpu::forward
