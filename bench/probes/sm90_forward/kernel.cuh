// Delta-rule forward, K = V = 128: one persistent launch, one CTA per SM. The first CTAs carry
// states, the others prepare packets for them; README.md has the schedule.
#pragma once
#include "carry.cuh"
#include "prepare_heads.cuh"

namespace deltic::gpu {

template <Gate kGate, GateForm kForm, bool kTransfer>
__global__ __launch_bounds__(kThreads, 1) void delta_forward(
    const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_g,
    const __grid_constant__ CUtensorMap map_o, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw[];
  grid_wait();  // the plan
  const Plan plan = *params.plan;
  const int wg = threadIdx.x / 128;
  // Final states of empty sequences.
  if (params.state_out && !kTransfer)
    for (int64_t j = blockIdx.x; j < int64_t(params.num_seqs) * params.num_value_heads;
         j += gridDim.x) {
      const int seq = int(j / params.num_value_heads);
      if (params.cu_seqlens[seq] == params.cu_seqlens[seq + 1])
        for (int i = threadIdx.x; i < kWidth * kWidth; i += kThreads)
          params.state_out[j * kWidth * kWidth + i] =
              params.state_in ? params.state_in[j * kWidth * kWidth + i] : 0.f;
    }
  constexpr int group = kTransfer ? 2 : 1;
  const bool is_carrier = int(blockIdx.x) < group * plan.carriers;
  auto& sc = *reinterpret_cast<CarrySmem<kGate>*>(raw);
  PrepareSmem& sp = *reinterpret_cast<PrepareSmem*>(raw);
  HeadSmem& sh = *reinterpret_cast<HeadSmem*>(raw);
  if (threadIdx.x == 0) {
    if (is_carrier) {
      init_carry_barriers<kGate, kTransfer>(sc);
    } else if constexpr (kGate == Gate::kChannel) {
      sp.plan = plan;
      for (int i = 0; i < kRawStages; i++)
        barrier_init(&sp.raw_full[i], 33),
            barrier_init(&sp.raw_empty[i], kRowThreads + kScoreThreads);
      for (int i = 0; i < kLevelBuffers; i++)
        barrier_init(&sp.level_full[i], kRowThreads),
            barrier_init(&sp.level_empty[i], kScoreThreads);
      for (int i = 0; i < 2; i++)
        barrier_init(&sp.rows_done[i], kRowThreads), barrier_init(&sp.place_free[i], 1),
            barrier_init(&sp.turn[i], kScoreThreads);
    } else {
      sh.plan = plan;
      for (int i = 0; i < kHeadGroups; i++) barrier_init(&sh.raw_full[i], 33);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if constexpr (kGate == Gate::kHead)
    if (!is_carrier && plan.num_seqs <= kTableSeqs)
      for (int i = threadIdx.x; i <= plan.num_seqs; i += kThreads)
        sh.prefix[i] = params.chunk_prefix[i], sh.cu_seqlens[i] = params.cu_seqlens[i];
  __syncthreads();
  const int preparer = blockIdx.x - group * plan.carriers;
  const int preparers = gridDim.x - group * plan.carriers;
  const int num_items = (plan.total - preparer + preparers - 1) / preparers;
  // The compiler gives a branch the registers it asks for only if the largest comes first.
  if (is_carrier && wg < 2) {
    cutlass::arch::warpgroup_reg_alloc<kCarryRegs>();
    carry_state<kGate, kTransfer>(sc, params, &map_o);
  } else if (is_carrier) {
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegs>();
    if (threadIdx.x == 256)
      load_packets<kGate, kTransfer>(sc, params, plan, {&map_q, &map_k, &map_v},
                                     blockIdx.x / group);
  } else if constexpr (kGate != Gate::kChannel) {
    prepare_heads(sh, params, {&map_q, &map_k, &map_g}, num_items);
  } else if (wg < 2) {
    cutlass::arch::warpgroup_reg_alloc<kRowRegs>();
    prepare_rows<kForm>(sp, params, num_items);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kScoreRegs>();
    prepare_scores<kForm>(sp, params, {&map_q, &map_k, &map_g}, num_items);
  }
}

}  // namespace deltic::gpu
