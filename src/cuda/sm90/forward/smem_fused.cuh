// A fused CTA: it carries the states of whole jobs and prepares their chunks itself, gates per head
// or none. Warpgroups, registers, shared memory, and what its carriers have of a chunk.
#pragma once
#include "cuda/sm90/forward/smem.h"
#include "cuda/sm90/forward/stage_move.cuh"

namespace deltic::gpu::forward {

// Warpgroups 0, 1 carry 64 value columns each; 2 forms scores; of 3 two warps invert, one sums
// gates, one thread of the last finds jobs, loads inputs and sends o out.
constexpr int kFusedCarryRegs = 192, kFusedScoreRegs = 72, kFusedSolveRegs = 56;
static_assert(2 * kFusedCarryRegs + kFusedScoreRegs + kFusedSolveRegs <= 512);
// Chunks under way: one is carried, one is complete or nearly so, one has its scores formed. Their
// o leaves up to two steps later.
constexpr int kFusedStages = 3;
// The scores' two products one after the other; a block of 16 x 16 after the other by the same
// instructions.
constexpr int kFusedPairs = 32, kFusedBlocks = 1;
constexpr int kFusedSolvers = 64;  // threads that invert
// Named barriers beside the carriers' (1 to 5): of the scoring warpgroup; of the two warps that
// invert.
constexpr int kFusedScoreBarrier = 6, kFusedInvertBarrier = 7;

struct FusedChunk {  // as its movers need it
  int token, head, batch;
  int tokens_left;  // of the job from here on; 0: there is no such chunk
};
struct FusedWalk {
  int own_job;      // that the CTA has without a ticket; -1: it has had it, or there is none
  int found;        // jobs of this CTA that are
  int job;          // of these, the next whose chunks come
  int state_bytes;  // of a given state that may be fetched ahead (dense_bytes)
};
constexpr int kFusedChunks = 8;  // known at a time: o leaves four chunks behind the last load
struct alignas(1024) FusedSlot : chunk::HeadScores {};  // the inverse's tile is an operand
struct FusedSmem {
  static constexpr bool kIsFused = true;
  static constexpr int kHalf = 2 * kHalfBytes;
  alignas(1024) uint8_t keys[kFusedStages][2 * kTileBytes];  // halves of k and q in turn
  static constexpr int kValues = kValueStages;
  alignas(1024) uint8_t v[kValues][2][kHalfBytes];  // [warpgroup], takes o, too
  alignas(1024) uint8_t aqk[kFusedStages][kHalfBytes];
  FusedSlot slot[kFusedStages];
  // Looked up ahead: at most one beyond that of the newest chunk, while the fifth before it is in
  // use.
  static constexpr int kJobs = 8;
  Job job[kJobs];
  Part part[2];
  FusedChunk chunk[kFusedChunks];
  FusedWalk walk;
  int first_half;                                    // of a carrying CTA: all of the values here
  uint64_t full[kFusedStages], empty[kFusedStages];  // tiles and gates; all of a chunk's places
  uint64_t scored[kFusedStages], solved[kFusedStages];
  uint64_t v_full[kValues], o_full[kValues];
  uint64_t job_full[kJobs];
  uint64_t begun;  // the first chunk is known
};
static_assert(sizeof(FusedSmem) <= kSmemBytes);
// Behind T, when L is read.
static_assert(kHalfBytes + sizeof(HeadFactors) <= sizeof(chunk::HeadScores::l));
__device__ inline HeadFactors& factors_in(chunk::HeadScores& s) {
  return *reinterpret_cast<HeadFactors*>(s.tile + kHalfBytes);
}

__device__ inline bool has_job(FusedSmem& s, const Params&, int job, int) {
  return job_at(s, job).place.count > 0;
}
__device__ inline int parts_of(const FusedSmem&) { return 1; }
__device__ inline int seat_of(const FusedSmem&) { return 0; }
template <bool kTransfer>
__device__ inline bool is_identity(const FusedSmem&) {
  return false;
}
__device__ inline uint8_t* keys_of(FusedSmem& s, int n) { return s.keys[n % kFusedStages]; }
__device__ inline const uint8_t* queries_of(const FusedSmem& s, int n) {
  return s.keys[n % kFusedStages] + kHalfBytes;
}
__device__ inline const uint8_t* update_keys(const FusedSmem& s, int n) {
  return s.keys[n % kFusedStages];
}
__device__ inline const uint8_t* inverse_of(const FusedSmem& s, int n) {
  return s.slot[n % kFusedStages].tile;
}
__device__ inline const uint8_t* scores_of(const FusedSmem& s, int n) {
  return s.aqk[n % kFusedStages];
}
__device__ inline const HeadFactors& factors_of(FusedSmem& s, int n) {
  return factors_in(s.slot[n % kFusedStages]);
}
// All of the chunk but its values: keys without rows past the end are the scores' work.
__device__ inline void wait_keys(FusedSmem& s, int n) {
  barrier_wait(&s.full[n % kFusedStages], n / kFusedStages & 1);
  barrier_wait(&s.solved[n % kFusedStages], n / kFusedStages & 1);
}
__device__ inline void free_chunk(FusedSmem& s, int n) { lanes_arrive(&s.empty[n % kFusedStages]); }

__device__ inline void init_fused_barriers(FusedSmem& s, int warpgroups) {
  for (int i = 0; i < kFusedStages; i++)
    barrier_init(&s.full[i], kRawArrivals), barrier_init(&s.empty[i], kWarpgroup * warpgroups),
        barrier_init(&s.scored[i], kScoreThreads), barrier_init(&s.solved[i], kFusedSolvers);
  for (int i = 0; i < s.kValues; i++)
    barrier_init(&s.v_full[i], 1), barrier_init(&s.o_full[i], kWarpgroupWarps * warpgroups);
  for (int i = 0; i < s.kJobs; i++) barrier_init(&s.job_full[i], 1);
  barrier_init(&s.begun, 1);
}

}  // namespace deltic::gpu::forward
