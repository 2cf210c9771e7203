// Who takes part in a launch, and who does what then: all CTAs that have started, or those that are
// there when the others have been waited for long enough.
#pragma once
#include "cuda/ptx/clock.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/schedule/attendance.h"
#include "cuda/schedule/roles.h"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

// A thread for each split of the CTAs into roles, and for each CTA: Hopper GPUs have 144 SMs at
// most.
constexpr int kRoleThreads = 512;
static_assert(kRoleThreads == kThreads);

struct RoleSearch {
  float time[kRoleThreads / 32];
  int best[kRoleThreads / 32];
};
__device__ inline schedule::Roles roles_of(int i) {
  return {i % (kRoleThreads / 2), 1 + i / (kRoleThreads / 2)};
}
__device__ inline void reduce(float& time, int& best) {
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) {
    const float t = __shfl_xor_sync(~0u, time, d);
    const int i = __shfl_xor_sync(~0u, best, d);
    if (t < time || (t == time && i < best)) time = t, best = i;
  }
}
// All threads: the roles that choose_split() finds, a thread for each; in the first warp the first
// of the best is known then.
__device__ inline void search_roles(schedule::Costs costs, const schedule::Work& work,
                                    RoleSearch& s) {
  const int tid = thread_index();
  float time = schedule::split_time(costs, work, roles_of(tid));
  int best = tid;
  reduce(time, best);
  if (tid % 32 == 0) s.time[tid / 32] = time, s.best[tid / 32] = best;
  __syncthreads();  // every warp's best is there
  if (tid < 32) {
    time = tid < kRoleThreads / 32 ? s.time[tid] : INFINITY;
    best = tid < kRoleThreads / 32 ? s.best[tid] : kRoleThreads;
    reduce(time, best);
    __syncwarp();
    if (tid == 0) s.time[0] = time, s.best[0] = best;
  }
}
__device__ inline void take_roles(Plan& plan, schedule::Costs costs, const schedule::Work& work,
                                  const RoleSearch& s) {
  // 0: no split at all would do.
  set_roles(plan, in_pairs(costs, work, {roles_of(max(s.best[0], 1)), s.time[0]}));
}

// The word, which is the given one if it was undecided. Relaxed: no other memory goes by it.
__device__ inline uint32_t decide(uint32_t* word, uint32_t as) {
  const uint32_t before = compare_and_swap(word, schedule::kUndecided, as);
  return before == schedule::kUndecided ? as : before;
}

// Before grid_wait, so that the trip to L2 costs nothing: the planning kernel lets this launch
// start only when the words are 0. The CTA's word, in the thread whose number is the CTA's.
__device__ inline uint32_t sign_in(const Params& params) {
  const int cta = blockIdx.x;
  if (thread_index() != cta) return schedule::kUndecided;
  return decide(attendance_word(params, cta), schedule::kPresent);
}
// All threads, after grid_wait; own: from sign_in(); s: any shared memory, free afterwards. Which
// of those that take part this CTA is, and the plan for their number; index -1: it came too late
// and leaves. A thread looks at the word of each CTA of the grid. Where all are there: one look, on
// its way together with the plan.
template <GateKind kGate>
__device__ inline Seat attend(RoleSearch& s, const Params& params, uint32_t own) {
  using namespace schedule;
  const int tid = thread_index(), ctas = grid_size(), cta = blockIdx.x;
  Seat seat{*params.plan, cta, ctas};
  uint32_t* const word = attendance_word(params, tid);
  uint32_t seen = tid >= ctas ? kAbsent : tid == cta ? own : load_relaxed(word);
  if (__syncthreads_and(tid >= ctas || seen == kPresent)) return seat;
  seat.index = -1;
  if (__syncthreads_or(tid == cta && seen == kAbsent)) return seat;
  const uint64_t begin = now_ns();
  const int fewest = num_states(params) + 1;
#pragma unroll 1
  while (!__syncthreads_and(seen != kUndecided)) {
    seat.count = __syncthreads_count(seen == kPresent);
    if (seen != kUndecided) continue;
    const bool is_enough =
        seat.count >= fewest &&
        float(now_ns() - begin) > 1e3f * longest_wait(seat.plan.time_us, ctas, seat.count);
    seen = is_enough ? decide(word, kAbsent) : load_relaxed(word);
  }
  seat.count = __syncthreads_count(seen == kPresent);
  seat.index = __syncthreads_count(seen == kPresent && tid < cta);
  if (seat.count < ctas) {
    const Work work = work_of(seat.plan, num_states(params), num_rows(params), seat.count);
    constexpr Costs kCosts = costs_of(kGate).shares;
    search_roles(kCosts, work, s);
    __syncthreads();  // the best are there
    take_roles(seat.plan, kCosts, work, s);
    __syncthreads();  // everybody has read them
  }
  return seat;
}

}  // namespace deltic::gpu::forward
