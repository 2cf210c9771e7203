// What a preparing CTA reads.
#pragma once
#include "plan.cuh"
#include "prepare_rows.cuh"

namespace deltic::gpu {

struct InputMaps {
  const CUtensorMap *q, *k, *g;
};

// A warp's part of what comes by ordinary loads, between issue and use.
struct Fetched {
  float a_log, beta[2], g[2];
  float4 bias;
  int rest;
};

// One warp: raw tiles and loads of the CTA's item n into stage st, which is free. Items go by step,
// then carrier, so that all carriers advance together.
template <Gate kGate, GateForm kForm, class Smem>
__device__ inline void begin_item(Smem& s, const Params& params, const InputMaps& maps, int n,
                                  int st, Fetched& f) {
  const int lane = threadIdx.x % 32;
  const Plan plan = {opaque(s.plan.total), opaque(s.plan.carriers), opaque(s.plan.steps),
                     opaque(s.plan.num_seqs)};
  const int carriers = group_of(params) * plan.carriers;
  const StepOf item = item_at(plan, blockIdx.x - carriers + n * (gridDim.x - carriers));
  const Place p = place_of(params, plan, item.carrier * plan.steps + item.step);
  const int first = __ldg(params.cu_seqlens + p.seq);
  const int len = __ldg(params.cu_seqlens + p.seq + 1) - first;
  const int token = first + p.chunk * kChunk;
  const int hv = opaque(params.num_value_heads),
            qk_head = divide(p.head, divide(hv, params.num_heads));
  f.rest = min(len - p.chunk * kChunk, kChunk);
  if (lane == 0) {
    uint64_t* bar = &s.raw_full[st];
    barrier_expect(bar, (kGate == Gate::kChannel ? 3 : 2) * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if constexpr (kGate == Gate::kChannel)
        tensor_load(s.g[st] + h * kHalf, maps.g, 64 * h, p.head, token, bar);
      tensor_load(s.k[st] + h * kHalf, maps.k, 64 * h, qk_head, token, bar);
      tensor_load(s.q[st] + h * kHalf, maps.q, 64 * h, qk_head, token, bar);
    }
    const int slot = item.step & (params.ring_slots - 1);  // a power of two
    s.stage[st].item = {f.rest, item.step,
                        params.ring + int64_t(item.carrier) * params.ring_slots + slot,
                        ready_flag(params, item.carrier, slot),
                        consumed_flag(params, group_of(params) * item.carrier)};
  }
  __syncwarp();
  f.bias = make_float4(0.f, 0.f, 0.f, 0.f);
  if constexpr (kGate != Gate::kNone && kForm != GateForm::kLogDecay) {
    f.a_log = __ldg(params.a_log + p.head);
    if (params.dt_bias) {
      if constexpr (kGate == Gate::kChannel)
        f.bias = __ldg(reinterpret_cast<const float4*>(params.dt_bias + p.head * kWidth) + lane);
      else
        f.bias.x = __ldg(params.dt_bias + p.head);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = 2 * lane + i;
    f.beta[i] = f.g[i] = 0.f;
    if (t < f.rest) {
      const int64_t at = int64_t(token + t) * hv + p.head;
      f.beta[i] = __bfloat162float(params.beta[at]);
      if constexpr (kGate == Gate::kHead) f.g[i] = __bfloat162float(params.g_head[at]);
    }
  }
}
// The same warp, later: beta, gates per head or the parameters of gates per channel.
template <Gate kGate, GateForm kForm, class Smem>
__device__ inline void finish_item(Smem& s, const Params& params, int st, const Fetched& f) {
  const int lane = threadIdx.x % 32;
  Stage& stage = s.stage[st];
  float slope = 0.f;
  if constexpr (kGate != Gate::kNone && kForm != GateForm::kLogDecay)
    slope = -expf(f.a_log) * (kForm == GateForm::kBounded ? kLog2e : 1.f);
  if constexpr (kGate == Gate::kChannel && kForm != GateForm::kLogDecay) {
    if (lane == 0) stage.slope = slope;
    const float by = kForm == GateForm::kBounded ? slope : kLog2e;
    *reinterpret_cast<float4*>(&stage.bias[4 * lane]) =
        make_float4(f.bias.x * by, f.bias.y * by, f.bias.z * by, f.bias.w * by);
  }
  float g[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = 2 * lane + i;
    float beta = 0.f;
    if (t < f.rest) {
      beta = rcp_approx(1.f + exp2_approx(-f.beta[i] * kLog2e));
      if constexpr (kGate == Gate::kHead) {
        if constexpr (kForm == GateForm::kBounded) {
          g[i] = params.lower_bound * kLog2e *
                 rcp_approx(1.f + exp2_approx(slope * (f.g[i] + f.bias.x)));
        } else if constexpr (kForm == GateForm::kSoftplus) {
          const float y = (f.g[i] + f.bias.x) * kLog2e;
          g[i] = slope * (fmaxf(y, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(y))));
        } else {
          g[i] = f.g[i] * kLog2e;
        }
        g[i] = fmaxf(g[i], -151.f);  // 2^-151 is 0; the sums keep their precision
      }
    }
    stage.beta[t] = beta;
  }
  if constexpr (kGate != Gate::kChannel) {
    float sum = g[0] + g[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float x = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += x;
    }
    const float last = __shfl_sync(~0u, sum, 31), before = __shfl_up_sync(~0u, sum, 1);
    const float sums[2] = {(lane ? before : 0.f) + g[0], sum};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float to = exp2_approx(sums[i]), from = exp2_approx(last - sums[i]);
      stage.g_sum[2 * lane + i] = sums[i];
      stage.f[2 * lane + i] = pack_bf16(to, to);
      stage.h[2 * lane + i] = pack_bf16(from, from);
    }
  }
  if (lane > 0) barrier_arrive(&s.raw_full[st]);
  __syncwarp();
  if (lane == 0) barrier_arrive(&s.raw_full[st]);
}

}  // namespace deltic::gpu
