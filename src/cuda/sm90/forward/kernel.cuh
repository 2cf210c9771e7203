// Delta-rule forward, K and V up to 128: one persistent launch, one CTA per SM. The first of those
// that take part carry states, the others prepare packets for them; README.md has the schedule.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/outside.cuh"
#include "cuda/sm90/forward/stage_attend.cuh"
#include "cuda/sm90/forward/stage_carry.cuh"
#include "cuda/sm90/forward/stage_heads.cuh"
#include "cuda/sm90/forward/stage_rows.cuh"
#include "cuda/sm90/forward/stage_scores.cuh"

namespace deltic::gpu::forward {

// E: of q, k, v, o and of all operands.
template <class E, GateKind kGate, deltic_gate_form kForm, bool kWideGate, bool kTransfer>
__global__ __launch_bounds__(kThreads, 1) void delta_forward(
    const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_g,
    const __grid_constant__ CUtensorMap map_o, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t own = sign_in(params);
  grid_wait();  // the plan
  const Seat seat = attend<kGate>(*reinterpret_cast<RoleSearch*>(smem), params, own);
  if (seat.index < 0) return;
  const Plan& plan = seat.plan;
  auto wg = [] { return int(thread_index()) / kWarpgroup; };
  if (!kTransfer) fill_outside(params, seat, thread_index(), kThreads);
  const int group = group_of(params, plan.parts);
  const bool is_carrier = seat.index < group * plan.carriers;
  auto& sc = *reinterpret_cast<CarrySmem<kGate>*>(smem);
  PrepareSmem& sp = *reinterpret_cast<PrepareSmem*>(smem);
  HeadSmem& sh = *reinterpret_cast<HeadSmem*>(smem);
  if (thread_index() == 0) {
    if (is_carrier) {
      sc.seat = seat, sc.first_half = plan.parts == 2 ? seat.index % 2 : 0;
      sc.state_bytes = params.split_chunks == 0 ? dense_bytes(params.state_in, params) : 0;
      init_carry_barriers<kGate, kTransfer>(sc, num_carrying(params, plan.parts));
    } else if constexpr (kGate == GateKind::kChannel) {
      sp.seat = seat;
      for (int i = 0; i < kRawStages; i++)
        barrier_init(&sp.raw_full[i], kRawArrivals), barrier_init(&sp.rows_done[i], kRowThreads);
      for (int i = 0; i < 2; i++)
        barrier_init(&sp.turn[i], kScoreThreads), barrier_init(&sp.inverse_read[i], kScoreThreads);
    } else {
      sh.seat = seat, sh.num_loaded = 0;
      for (int i = 0; i < kRawTiles; i++)
        barrier_init(&sh.raw_full[i], kRawArrivals),
            barrier_init(&sh.raw_empty[i], kWarpgroupWarps);
      for (int i = 0; i < kSolvers; i++) barrier_init(&sh.l_full[i], kScoreThreads);
      for (int i = 0; i < kScorers; i++)
        barrier_init(&sh.turn[i], kWarpgroupWarps), barrier_init(&sh.aqk_empty[i], 1);
    }
    fence_barrier_init();
  }
  if constexpr (kGate == GateKind::kHead)
    if (!is_carrier && plan.num_pieces <= kTablePieces)
      for (int i = thread_index(); i <= plan.num_pieces; i += kThreads) {
        sh.prefix[i] = params.chunk_prefix[i];
        if (i < plan.num_pieces) sh.spans[i] = span_in_memory(params, i);
      }
  __syncthreads();
  const int preparer = seat.index - group * plan.carriers;
  const int preparers = seat.count - group * plan.carriers;
  const int num_items = schedule::num_items_of(plan.total, preparer, preparers);
  // The compiler gives a branch the registers it asks for only if the largest comes first.
  if (is_carrier && wg() < 2) {
    more_registers<kCarryRegs>();
    if (wg() < num_carrying(params, sc.seat.plan.parts))
      carry_state<E, kGate, kTransfer>(sc, params);
  } else if (is_carrier) {
    fewer_registers<kLoadRegs>();
    const int carrier = carrier_of(sc, params);
    const auto mover = Mover(thread_index() / 32);
    if (thread_index() % 32 == 0) {
      if (mover == Mover::kPackets)
        load_packets<kGate, kTransfer>(sc, params, carrier);
      else if (mover == Mover::kInputs)
        load_inputs<kGate, kTransfer>(sc, params, {&map_q, &map_k, &map_v}, carrier);
      else if (!kTransfer && mover == Mover::kOutputs)
        store_outputs<kGate>(sc, params, &map_o, carrier);
      else if (mover == Mover::kPlaces)
        free_places<kGate>(sc, params, carrier);
    }
  } else if constexpr (kGate != GateKind::kChannel) {
    if (wg() < kScorers)
      score_heads<E>(sh, params, num_items);
    else
      solve_heads<E>(sh, params, {&map_q, &map_k, &map_g}, num_items);
  } else if (wg() < 2) {
    more_registers<kRowRegs>();
    prepare_rows<E, kForm, kWideGate, !kTransfer>(sp, params, num_items);
  } else {
    fewer_registers<kScoreRegs>();
    prepare_scores<E, kForm, kWideGate, !kTransfer>(sp, params, {&map_q, &map_k, &map_g},
                                                    num_items);
  }
}

}  // namespace deltic::gpu::forward
