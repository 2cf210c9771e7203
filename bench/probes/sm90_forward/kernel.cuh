// Delta-rule forward, K = V = 128: one persistent launch, one CTA per SM. The first CTAs carry
// states, the others prepare packets for them; README.md has the schedule.
#pragma once
#include "carry.cuh"
#include "prepare_scores.cuh"

namespace deltic::gpu {

// One warp: raw tiles, gates' parameters and beta of the CTA's items, and the packet's place once it is
// free. Items go by step, then carrier, so that all carriers advance together.
template <Gate kGate, GateForm kForm>
__device__ inline void load_items(PrepareSmem& s, const Params& params, const Plan& plan,
                                  const CUtensorMap* map_q, const CUtensorMap* map_k,
                                  const CUtensorMap* map_g, int preparer, int preparers,
                                  int num_items) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int n = 0; n < num_items; n++) {
    const int st = n % kRawStages, index = preparer + n * preparers;
    const StepOf at = item_at(plan, index);
    const int step = at.step, carrier = at.carrier;
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
          tensor_load(s.g[st] + h * kHalf, map_g, 64 * h, p.head, token, bar);
        tensor_load(s.k[st] + h * kHalf, map_k, 64 * h, qk_head, token, bar);
        tensor_load(s.q[st] + h * kHalf, map_q, 64 * h, qk_head, token, bar);
      }
      const int slot = step % params.ring_slots;
      stage.item = {token,
                    rest,
                    p.head,
                    1,
                    params.ring + int64_t(carrier) * params.ring_slots + slot,
                    ready_flag(params, carrier, slot),
                    uint32_t(step + 1)};
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
    if (step >= params.ring_slots) {
      if (lane == 0) wait_flag(consumed_flag(params, carrier), step - params.ring_slots + 1);
      __syncwarp();
    }
    if (lane > 0) barrier_arrive(&s.raw_full[st]);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.raw_full[st]);
  }
}

template <Gate kGate, GateForm kForm>
__global__ __launch_bounds__(kThreads, 1) void delta_forward(
    const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_g,
    const __grid_constant__ CUtensorMap map_o, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const Plan plan = *params.plan;
  const int wg = threadIdx.x / 128;
  // Final states of empty sequences.
  if (params.state_out && !params.is_transfer)
    for (int64_t j = blockIdx.x; j < int64_t(params.num_seqs) * params.num_value_heads;
         j += gridDim.x) {
      const int seq = int(j / params.num_value_heads);
      if (params.cu_seqlens[seq] == params.cu_seqlens[seq + 1])
        for (int i = threadIdx.x; i < kWidth * kWidth; i += kThreads)
          params.state_out[j * kWidth * kWidth + i] =
              params.state_in ? params.state_in[j * kWidth * kWidth + i] : 0.f;
    }
  if (int(blockIdx.x) < plan.carriers) {
    CarrySmem& s = *reinterpret_cast<CarrySmem*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kKeyStages; i++)
        barrier_init(&s.keys_full[i], 1), barrier_init(&s.keys_empty[i], 256);
      for (int i = 0; i < kRestStages; i++)
        barrier_init(&s.rest_full[i], 1), barrier_init(&s.rest_empty[i], 256);
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x >= 32 * kLoadWarp) {
      if (threadIdx.x == 32 * kLoadWarp) load_packets(s, params, plan, &map_v, blockIdx.x);
    } else if (wg < 2) {
      cutlass::arch::warpgroup_reg_alloc<kCarryRegs>();
      carry_state(s, params, plan, &map_o, blockIdx.x);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<kIdleRegs>();
    }
  } else {
    PrepareSmem& s = *reinterpret_cast<PrepareSmem*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kRawStages; i++)
        barrier_init(&s.raw_full[i], 33),
            barrier_init(&s.raw_empty[i], kRowThreads + kScoreThreads);
      for (int i = 0; i < kLevelBuffers; i++)
        barrier_init(&s.level_full[i], kRowThreads), barrier_init(&s.level_empty[i], kScoreThreads);
      for (int i = 0; i < 2; i++) barrier_init(&s.rows_done[i], kRowThreads);
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const int preparer = blockIdx.x - plan.carriers, preparers = gridDim.x - plan.carriers;
    const int num_items = (plan.total - preparer + preparers - 1) / preparers;
    if (threadIdx.x >= 32 * kLoadWarp) {
      load_items<kGate, kForm>(s, params, plan, &map_q, &map_k, &map_g, preparer, preparers,
                               num_items);
    } else if (wg < 2) {
      cutlass::arch::warpgroup_reg_alloc<kRowRegs>();
      prepare_rows<kGate, kForm>(s, params, num_items);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<kScoreRegs>();
      prepare_scores<kGate>(s, params, num_items);
    }
  }
}

}  // namespace deltic::gpu
