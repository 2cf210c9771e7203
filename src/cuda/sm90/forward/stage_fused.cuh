// What the warps of a fused CTA do that carry nothing: a warpgroup forms scores, two warps invert,
// one sums gates, a thread moves.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/smem_fused.cuh"
#include "cuda/sm90/forward/stage_heads.cuh"

namespace deltic::gpu::forward {

struct FusedMaps {
  const CUtensorMap *q, *k, *v, *o;
};

// One thread: draws the CTA's next job and looks it up for all; count 0: there is none, and it is
// not called again.
__device__ inline void find_fused(FusedSmem& s, const Params& params) {
  FusedWalk& walk = s.walk;
  Job& j = s.job[walk.found % s.kJobs];
  schedule::Tickets& tickets = tickets_of(params, grid_size());
  const int hv = params.num_value_heads;
  int count = 0;
  while (count == 0) {  // pieces that are not sorted may be empty
    const int job = walk.own_job >= 0 ? walk.own_job : int(draw(&tickets.next));
    walk.own_job = -1;
    const int place = divide(job, hv);
    if (place >= tickets.pieces) break;
    const int piece = tickets.is_sorted ? tickets.piece[place] : place;
    j.piece = params.pieces[piece];
    count = schedule::chunks_of(j.piece.length);
    j.place = {piece, job - place * hv, 0, 0, count, count, params.chunk_prefix[piece]};
  }
  j.place.count = count;
  if (count > 0) fetch_state(params, j, walk.state_bytes);
  barrier_arrive(&s.job_full[walk.found % s.kJobs]);
  walk.found++;
}
// One thread: chunk n, which follows the newest one, for all.
__device__ inline void find_chunk(FusedSmem& s, const Params& params, int n) {
  FusedChunk at = s.chunk[(n + kFusedChunks - 1) % kFusedChunks];
  const bool is_new = at.tokens_left <= kChunk;
  if (is_new) {
    const Job& j = s.job[s.walk.job++ % s.kJobs];
    at = {j.piece.token, j.place.head, j.piece.batch, j.place.count > 0 ? j.piece.length : 0};
  } else {
    at.token += kChunk, at.tokens_left -= kChunk;
  }
  s.chunk[n % kFusedChunks] = at;
  if (schedule::draws_at(schedule::chunks_of(at.tokens_left), is_new)) find_fused(s, params);
}

__device__ inline void load_keys(FusedSmem& s, const Params& params, const FusedMaps& maps, int n) {
  const FusedChunk& c = s.chunk[n % kFusedChunks];
  uint64_t* const bar = &s.full[n % kFusedStages];
  uint8_t* const to = s.keys[n % kFusedStages];
  const int head = divide(c.head, divide(params.num_value_heads, params.num_heads));
  barrier_expect(bar, 2 * kTileBytes);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    tensor_load<kEvictNormal>(to + 2 * h * kHalfBytes, maps.k, 64 * h, head, c.token, c.batch, bar);
    tensor_load<kEvictNormal>(to + (2 * h + 1) * kHalfBytes, maps.q, 64 * h, head, c.token, c.batch,
                              bar);
  }
}
// Into the place of a chunk whose o has left.
__device__ inline void load_values(FusedSmem& s, const FusedMaps& maps, int n, int warpgroups) {
  const FusedChunk& c = s.chunk[n % kFusedChunks];
  uint64_t* const bar = &s.v_full[n % s.kValues];
  barrier_expect(bar, warpgroups * kHalfBytes);
  for (int i = 0; i < warpgroups; i++)
    tensor_load(s.v[n % s.kValues][i], maps.v, 64 * i, c.head, c.token, c.batch, bar);
}
__device__ inline void send_output(FusedSmem& s, const FusedMaps& maps, int n, int warpgroups) {
  const FusedChunk& c = s.chunk[n % kFusedChunks];
  barrier_wait(&s.o_full[n % s.kValues], n / s.kValues & 1);
  if (c.tokens_left >= kChunk)
    for (int i = 0; i < warpgroups; i++)
      tensor_store(maps.o, s.v[n % s.kValues][i], 64 * i, c.head, c.token, c.batch);
}

__device__ inline bool has_chunk(const FusedSmem& s, int n) {
  return reread(s.chunk[n % kFusedChunks].tokens_left) > 0;
}

// One thread: jobs, inputs, outputs. Chunk n takes the places of chunk n - 3; its values come a
// chunk later, when o of chunk n - 5 has left theirs.
__device__ inline void move_fused(FusedSmem& s, const Params& params, const FusedMaps& maps) {
  s.walk = {tickets_of(params, grid_size()).is_sorted ? -1 : int(blockIdx.x), 0, 0,
            params.split_chunks == 0 ? dense_bytes(params.state_in, params) : 0};
  s.chunk[kFusedChunks - 1].tokens_left = 0;  // ahead of the first
  find_fused(s, params);
  find_chunk(s, params, 0);
  barrier_arrive(&s.begun);
  const int warpgroups = num_carrying(params, 1);
  auto follow = [&](int n) {  // values of the chunk before n, o of four before it
    bulk_store_wait_read();
    load_values(s, maps, n - 1, warpgroups);
  };
  int n = 0;
#pragma unroll 1
  for (; has_chunk(s, n); n++) {
    const int st = n % kFusedStages;
    find_chunk(s, params, n + 1);  // seen by all who see the tiles
    if (n > 0) follow(n);
    barrier_wait(&s.empty[st], (n / kFusedStages & 1) ^ 1);
    load_keys(s, params, maps, n);
    if (n >= s.kValues) send_output(s, maps, n - s.kValues, warpgroups);
  }
  if (n > 0) follow(n);
#pragma unroll 1
  for (int i = max(n - s.kValues, 0); i < n; i++) send_output(s, maps, i, warpgroups);
  bulk_store_wait();
}

// A warp: gates of every chunk.
__device__ inline void sum_gates(FusedSmem& s, const Params& params) {
  barrier_wait(&s.begun, 0);
  __syncwarp();
#pragma unroll 1
  for (int n = 0; has_chunk(s, n); n++) {
    const FusedChunk& c = s.chunk[n % kFusedChunks];
    const int st = n % kFusedStages, parity = n / kFusedStages & 1;
    const GateRows rows = load_rows(params, c.head, c.batch, c.token, c.tokens_left);
    barrier_wait(&s.empty[st], parity ^ 1);
    __syncwarp();
    put_gates(s.slot[st], params, rows);
    arrive_item(&s.full[st]);
    barrier_wait(&s.full[st], parity);  // the next chunk is known
    __syncwarp();
  }
}

// A warpgroup: scores of every chunk.
__device__ inline void clear_scores(FusedSmem& s) {
  for (int i = thread_index() % kWarpgroup; i < kFusedStages * kHalfBytes / 16; i += kWarpgroup)
    reinterpret_cast<uint4*>(s.aqk[0])[i] = uint4{0, 0, 0, 0};  // above the diagonal it stays zero
}
template <class E>
__device__ inline void score_fused(FusedSmem& s, const Params& params) {
  barrier_wait(&s.begun, 0);
  __syncwarp();
  int n = 0;
#pragma unroll 1
  for (; has_chunk(s, n); n++) {
    const int st = n % kFusedStages;
    barrier_wait(&s.full[st], n / kFusedStages & 1);
    __syncwarp();
    const int tokens_left = min(reread(s.chunk[n % kFusedChunks].tokens_left), kChunk);
    score_chunk<E, kFusedPairs, kFusedBlocks>(
        s.slot[st], s.keys[st], s.aqk[st], tokens_left, params, kFusedScoreBarrier, [] {}, [] {});
    lanes_arrive(&s.scored[opaque(st)]);
  }
  // There is none: those who invert may leave. Not before both are past the chunk that had the
  // place before: nothing else keeps this from ending a second phase there, which waits for the
  // first to end would take for none.
  if (n >= kFusedStages) barrier_wait(&s.solved[n % kFusedStages], (n / kFusedStages - 1) & 1);
  barrier_arrive(&s.scored[n % kFusedStages]);
}

// Two warps: the inverse of every chunk.
template <class E>
__device__ inline void solve_fused(FusedSmem& s) {
#pragma unroll 1
  for (int n = 0;; n++) {
    barrier_wait(&s.scored[n % kFusedStages], n / kFusedStages & 1);
    __syncwarp();
    if (!has_chunk(s, n)) break;
    // Read anew: else they are kept beside the blocks of the inverse.
    const auto stage = [&] { return opaque(n) % kFusedStages; };
    const auto half = [] { return thread_index() / 32 % 2; };
    const auto sync = [] { named_sync(kFusedInvertBarrier, kFusedSolvers); };
    chunk::invert_by_two<chunk::Stairs>(s.slot[stage()].l, half, sync);
    sync();  // the inverse is complete
    chunk::HeadScores& work = s.slot[stage()];
    chunk::put_solved_by_two<E>(work, half(), chunk::Lane(thread_index()), sync);
    if (half() == 0)
      write_factors<E>(work, factors_in(work),
                       [](void* to, uint32_t x) { *static_cast<uint32_t*>(to) = x; });
    fence_async_proxy();
    lanes_arrive(&s.solved[stage()]);
  }
}

}  // namespace deltic::gpu::forward
