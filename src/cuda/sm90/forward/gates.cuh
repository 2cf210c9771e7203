// Gates and beta of a token, from the forward's parameters.
#pragma once
#include "cuda/sm90/forward/params.h"
#include "cuda/tile/gate_approx.cuh"

namespace deltic::gpu::forward {

__device__ inline deltic_gate_form form_of(const Params& p) {
  return p.form == GateForm::kBounded    ? DELTIC_GATE_BOUNDED
         : p.form == GateForm::kSoftplus ? DELTIC_GATE_SOFTPLUS
                                         : DELTIC_GATE_LOG_DECAY;
}
__device__ inline float beta_value(const Params& p, float x) {
  return p.has_sigmoid ? scaled_sigmoid(p.beta_scale, x) : x;
}
// log2 of a decay per head.
__device__ inline float head_decay(const Params& p, float x, int head) {
  const float rate = p.a_log.data ? gate_rate(load_number(p.a_log.data, p.a_log.dtype, head)) : 1.f;
  if (p.dt_bias.data) x += load_number(p.dt_bias.data, p.dt_bias.dtype, head);
  return log2_decay(form_of(p), p.lower_bound, x, rate);
}

}  // namespace deltic::gpu::forward
