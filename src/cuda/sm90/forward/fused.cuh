// Delta-rule forward, gates per head or none, where jobs fill the GPU: every CTA carries whole jobs
// and prepares their chunks itself. CTAs wait for nothing but the plan. The same functions for
// every step of the arithmetic as in kernel.cuh, and the same bits.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/outside.cuh"
#include "cuda/sm90/forward/stage_carry_fused.cuh"
#include "cuda/sm90/forward/stage_fused.cuh"

namespace deltic::gpu::forward {

template <class E>
__global__ __launch_bounds__(kThreads,
                             1) void delta_forward_fused(const __grid_constant__ CUtensorMap map_q,
                                                         const __grid_constant__ CUtensorMap map_k,
                                                         const __grid_constant__ CUtensorMap map_v,
                                                         const __grid_constant__ CUtensorMap map_o,
                                                         const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<FusedSmem*>(smem);
  auto wg = [] { return int(thread_index()) / kWarpgroup; };
  if (thread_index() == 0) {
    s.first_half = 0;
    init_fused_barriers(s, num_carrying(params, 1));
    fence_barrier_init();
  }
  if (wg() == 2) clear_scores(s);
  __syncthreads();
  grid_wait();  // the plan
  // The compiler gives a branch the registers it asks for only if the largest comes first.
  if (wg() < 2) {
    more_registers<kFusedCarryRegs>();
    if (wg() < num_carrying(params, 1)) carry_fused<E>(s, params);
  } else if (wg() == 2) {
    fewer_registers<kFusedScoreRegs>();
    score_fused<E>(s, params);
  } else {
    fewer_registers<kFusedSolveRegs>();
    const int warp = thread_index() / 32 % kWarpgroupWarps;
    if (warp < kFusedSolvers / 32) {
      fill_outside(params, {*params.plan, int(blockIdx.x), grid_size()},
                   thread_index() % kFusedSolvers, kFusedSolvers);
      solve_fused<E>(s);
    } else if (warp == 2) {
      sum_gates(s, params);
    } else if (thread_index() % 32 == 0) {
      move_fused(s, params, {&map_q, &map_k, &map_v, &map_o});
    }
  }
}

}  // namespace deltic::gpu::forward
