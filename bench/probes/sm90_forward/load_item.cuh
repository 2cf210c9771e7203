// What a preparing CTA reads.
#pragma once
#include "plan.cuh"
#include "prepare_rows.cuh"

namespace deltic::gpu {

struct InputMaps {
  const CUtensorMap *q, *k, *g;
};

// One warp: raw tiles, the gate's parameters and beta of the CTA's item n.
// Items go by step, then carrier, so that all carriers advance together.
template <Gate kGate, GateForm kForm>
__device__ inline void load_item(PrepareSmem& s, const Params& params, const InputMaps& maps,
                                 int n) {
  const int lane = threadIdx.x % 32, st = n % kRawStages;
  const Plan plan = *params.plan;
  const StepOf item = item_at(plan, blockIdx.x - plan.carriers + n * (gridDim.x - plan.carriers));
  const int step = item.step, carrier = item.carrier;
  Stage& stage = s.stage[st];
  barrier_wait(&s.raw_empty[st], (n / kRawStages & 1) ^ 1);
  const int position = carrier * plan.steps + step;
  const Place p = place_of(params, plan, position);
  const int first = params.cu_seqlens[p.seq], len = params.cu_seqlens[p.seq + 1] - first;
  const int token = first + p.chunk * kChunk, rest = min(len - p.chunk * kChunk, kChunk);
  const int hv = params.num_value_heads, qk_head = p.head / (hv / params.num_heads);
  if (lane == 0) {
    uint64_t* bar = &s.raw_full[st];
    barrier_expect(bar, (kGate == Gate::kChannel ? 3 : 2) * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (kGate == Gate::kChannel)
        tensor_load(s.g[st] + h * kHalf, maps.g, 64 * h, p.head, token, bar);
      tensor_load(s.k[st] + h * kHalf, maps.k, 64 * h, qk_head, token, bar);
      tensor_load(s.q[st] + h * kHalf, maps.q, 64 * h, qk_head, token, bar);
    }
    const int slot = step % params.ring_slots;
    stage.item = {rest, step, params.ring + int64_t(carrier) * params.ring_slots + slot,
                  ready_flag(params, carrier, slot), consumed_flag(params, carrier)};
  }
  float slope = 0.f;
  if (kGate != Gate::kNone && kForm != GateForm::kLogDecay)
    slope = -expf(params.a_log[p.head]) * (kForm == GateForm::kBounded ? kLog2e : 1.f);
  if constexpr (kGate == Gate::kChannel && kForm != GateForm::kLogDecay) {
    if (lane == 0) stage.slope = slope;
    float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
    if (params.dt_bias)
      b = *reinterpret_cast<const float4*>(params.dt_bias + p.head * kWidth + 4 * lane);
    const float f = kForm == GateForm::kBounded ? slope : kLog2e;
    *reinterpret_cast<float4*>(&stage.bias[4 * lane]) =
        make_float4(b.x * f, b.y * f, b.z * f, b.w * f);
  }
  float g[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = 2 * lane + i;
    float beta = 0.f;
    g[i] = 0.f;
    if (t < rest) {
      const int64_t at = int64_t(token + t) * hv + p.head;
      beta = __bfloat162float(params.beta[at]);
      beta = rcp_approx(1.f + exp2_approx(-beta * kLog2e));
      if constexpr (kGate == Gate::kHead) {
        const float raw = __bfloat162float(params.g_head[at]);
        const float bias = params.dt_bias ? params.dt_bias[p.head] : 0.f;
        if constexpr (kForm == GateForm::kBounded) {
          g[i] = params.lower_bound * kLog2e *
                 rcp_approx(1.f + exp2_approx(slope * (raw + bias)));
        } else if constexpr (kForm == GateForm::kSoftplus) {
          const float y = (raw + bias) * kLog2e;
          g[i] = slope * (fmaxf(y, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(y))));
        } else {
          g[i] = raw * kLog2e;
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
      const float f = exp2_approx(sums[i]), h = exp2_approx(last - sums[i]);
      stage.g_sum[2 * lane + i] = sums[i];
      stage.f[2 * lane + i] = pack_bf16(f, f);
      stage.h[2 * lane + i] = pack_bf16(h, h);
    }
  }
  if (lane > 0) barrier_arrive(&s.raw_full[st]);
  __syncwarp();
  if (lane == 0) barrier_arrive(&s.raw_full[st]);
}

}  // namespace deltic::gpu
