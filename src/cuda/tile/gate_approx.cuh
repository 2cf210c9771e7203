// Gate and beta forms by approximate instructions of 2 units in the last place, where tensor cores
// would wait for the exact ones (gates.cuh, which all other kernels have).
//
// Two sets of functions, because two are needed. The forward has decays, or log decays in base 2,
// at the fewest instructions: its softplus is a logarithm of 1 + e. The backward has natural logs,
// whose gradients need what 1 + e loses of a slow gate: a polynomial of e.
#pragma once

#include <type_traits>

#include "cuda/ptx/numbers.cuh"
#include "cuda/tile/gate_gradients.cuh"

namespace deltic::gpu {

inline constexpr float kLog2e = 1.4426950408889634f;

// 1 / (1 + 2^t), the sigmoid of -t in base 2. 2^inf = inf and 1 / inf = 0 need no clamp.
__device__ inline float falling_sigmoid(float t) { return rcp_approx(1.0f + exp2_approx(t)); }
// log2(1 + 2^t), the softplus in base 2.
__device__ inline float softplus_log2(float t) {
  return fmaxf(t, 0.0f) + log2_approx(1.0f + exp2_approx(-fabsf(t)));
}

// scale: 1, or 2 of twice a sigmoid.
__device__ inline float scaled_sigmoid(float scale, float x) {
  return scale * falling_sigmoid(-x * kLog2e);
}

// log2 of a decay, per head. x = g + bias.
__device__ inline float log2_decay(deltic_gate_form form, float lower_bound, float x, float rate) {
  if (form == DELTIC_GATE_BOUNDED) {
    x = lower_bound * kLog2e * falling_sigmoid(-rate * kLog2e * x);
  } else {
    x *= kLog2e;
    if (form == DELTIC_GATE_SOFTPLUS) x = -rate * softplus_log2(x);
  }
  return x < -151.0f ? -151.0f : x;  // 2^-151 is 0; the sums keep their precision; NaN stays
}
// The decay of one channel from the raw g. slope, bias and bound carry log2(e): of a bounded gate
// slope = -rate log2(e), bias = slope dt_bias; of softplus slope = -rate, bias = dt_bias log2(e).
template <deltic_gate_form kForm>
__device__ inline float channel_decay(float raw, float slope, float bias, float bound) {
  if constexpr (kForm == DELTIC_GATE_BOUNDED) {
    return exp2_approx(bound * falling_sigmoid(fmaf(raw, slope, bias)));
  } else if constexpr (kForm == DELTIC_GATE_SOFTPLUS) {
    return exp2_approx(slope * softplus_log2(fmaf(raw, kLog2e, bias)));
  } else {
    return exp2_approx(raw * kLog2e);
  }
}

// Calls f with the form as a constant: outside of loops, whose code is then that of one form.
template <class F>
__device__ void with_form(deltic_gate_form form, F&& f) {
  if (form == DELTIC_GATE_BOUNDED) {
    f(std::integral_constant<deltic_gate_form, DELTIC_GATE_BOUNDED>{});
  } else {
    f(std::integral_constant<deltic_gate_form, DELTIC_GATE_SOFTPLUS>{});
  }
}

// log(1 + e) of 0 <= e <= 1: e times a polynomial, off by 2e-7. 1 + e would lose what a slow gate
// has; with a logarithm where it does not, this is as many instructions.
__device__ inline float log1p_unit(float e) {
  float x = -0.0085392092f;
  x = fmaf(x, e, 0.0440896391f);
  x = fmaf(x, e, -0.107681731f);
  x = fmaf(x, e, 0.177452434f);
  x = fmaf(x, e, -0.244954639f);
  x = fmaf(x, e, 0.3327548f);
  x = fmaf(x, e, -0.499974054f);
  return e * fmaf(x, e, 0.999999806f);
}

// Log decays of channels whose A_log is the same, and their gradients. x = g + bias, and a NaN
// stays one. All kernels of the backward evaluate these, in this order, so that their decays agree;
// y and its gradients are off by 1e-5 of themselves at most, where the exponential does not
// underflow (2^-126; the exact one goes on to 2^-149).
template <deltic_gate_form kForm>
struct ApproxGate {
  static constexpr bool kBounded = kForm == DELTIC_GATE_BOUNDED;
  float rate, lower_bound;  // rate: gate_rate(A_log), or 1
  float scale;              // x to the exponential's argument
  float most;               // bounded: beyond this argument decays are clamped

  __device__ ApproxGate(float rate_, float lower_bound_)
      : rate(rate_),
        lower_bound(lower_bound_),
        scale(kBounded ? rate_ * kLog2e : kLog2e),
        most(lower_bound_ < kMinLogDecay
                 ? log2_approx(kMinLogDecay * rcp_approx(lower_bound_ - kMinLogDecay))
                 : INFINITY) {}

  // The log decay, clamped.
  __device__ float log_decay(float x) const {
    const float t = x * scale;
    if constexpr (kBounded) {
      return max_or_nan(lower_bound * falling_sigmoid(-t), kMinLogDecay);
    } else {
      const float e = exp2_approx(-fabsf(t));
      return max_or_nan(-rate * (fmaxf(x, 0.0f) + log1p_unit(e)), kMinLogDecay);
    }
  }
  // Its gradients. Nothing passes a log decay that was clamped, and a dy of 0 gives 0 where x, or
  // y, is infinite. e r^2 is the slope of the sigmoid on both sides of 0.
  __device__ GateGradient gradient(float x, float dy) const {
    const float t = x * scale, e = exp2_approx(-fabsf(t)), r = rcp_approx(1.0f + e);
    if constexpr (kBounded) {
      const bool passes = !(t > most) && dy != 0;
      // In this order it overflows where dg does, and the rate keeps it from getting too small.
      const float dg = passes ? e * rate * r * r * lower_bound * dy : 0.0f;
      return {dg, passes ? dg * x : 0.0f};
    } else {
      const float y = -rate * (fmaxf(x, 0.0f) + log1p_unit(e));
      const bool passes = !(y < kMinLogDecay) && dy != 0;
      const float sigmoid = (x < 0 ? e : 1.0f) * r;
      return {passes ? -rate * sigmoid * dy : 0.0f, passes ? y * dy : 0.0f};
    }
  }
};

}  // namespace deltic::gpu
