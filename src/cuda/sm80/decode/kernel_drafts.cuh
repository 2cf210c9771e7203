// Drafted tokens: one CTA per (sequence, value head, slice of value columns). The state is read
// once, and meanwhile the tokens are multiplied with one another; then all of them with the state,
// on tensor cores, and one after the other is solved in registers.
#pragma once

#include <cstddef>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/decode/kernel.cuh"
#include "cuda/sm80/decode/stage_drafts.cuh"

namespace deltic::gpu::decode {

// Paths and products of a warp's two tokens: one from the front and one from the back, so that
// warps have equally many ancestors. At its end the state and all rows are there, for all threads.
template <class Tr>
__device__ void lay_drafts(const DraftParams& p, const Slice& at, const Place& place,
                           DraftStage<Tr>& d) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int tokens[2] = {warp, Tr::kStageTokens - 1 - warp};
  DraftRows<Tr> rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (tokens[i] >= place.length) continue;
    walk_path<Tr>(tokens[i], d, rows[i]);
    const bool has_row = p.updates.present && has_update(p, tokens[i]);
    if (has_row && at.first == 0) store_keys<Tr>(p, at, tokens[i], d.stage);
  }
  __syncthreads();  // k and q have been read by all warps
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (tokens[i] >= place.length) continue;
    write_split<Tr>(d.stage.k[tokens[i]], d.stage.q[tokens[i]], rows[i]);
  }
  copies_wait<0>();
  __syncthreads();  // all threads' copies of the state, products, and rows are there
}

// Where tokens start from; the caller's barrier makes it visible. Of lists that are wrong a token
// before it.
template <class Tr>
__device__ void lay_parents(const Params& p, const Slice& at, const Place& place,
                            DraftStage<Tr>& d) {
  const int t = static_cast<int>(threadIdx.x);
  if (t >= place.length) return;
  const int parent =
      p.slots.parents.present ? parent_of(p.slots, static_cast<int>(at.n), t) : t - 1;
  d.parent[t] = max(min(parent, t - 1), -1);
}

// CTAs as of decode_kernel; at most kStageTokens of a sequence.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    drafts_kernel(const __grid_constant__ DraftParams p) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& d = *reinterpret_cast<DraftStage<Tr>*>(memory);
  grid_wait();
  if (is_wrong(p.tokens)) return;
  if (is_past_slices(static_cast<const Params&>(p))) return;
  const Slice at = find_slice<Tr>(p, blockIdx.x);
  // In decode_kernel's order: lists, tokens, state.
  const SlotEntries<int> entries = load_slots<int>(p.slots, at.n);
  Place place = find_place(p.tokens, at.n);
  place.length = min(place.length, Tr::kStageTokens);
  RawTokens tokens;
  load_keys<Tr>(p, place, at, 0, place.length, tokens);
  load_values<Tr>(p, place, at, 0, place.length, tokens);
  const Slots<int> slots = find_slots<int>(p.slots, at.n, entries);
  const bool is_out = is_skipped(p.slots, at.n, place.length, slots);
  if (is_out || place.length == 0) {
    zero_outputs(p, at, place);
    if (p.updates.present) store_rest<Tr::kThreads>(p, at, 0);
    return;
  }
  request_tile<Tr>(p, at, slots.from, d.stage);
  copies_commit();
  grid_release();  // the next launch may come, and waits likewise
  lay_parents<Tr>(p, at, place, d);
  lay_keys<Tr>(p, place.length, tokens, d.stage);
  lay_gates<Tr>(p, place.length, tokens, d.stage);
  lay_betas<Tr>(p, place.length, tokens, d.stage);
  __syncthreads();  // the tokens are there, for all threads
  lay_drafts<Tr>(p, at, place, d);
  DraftSums<Tr> sums = {};
  multiply_state<Tr>(d.stage, sums);
  __syncthreads();  // the state has been read by all warps
  lay_columns<Tr>(p, place.length, tokens, values_of(d.stage));
  __syncthreads();  // v is there, for all threads
  solve_drafts<Tr>(p, at, place, d, sums);
  if (p.updates.present) store_rest<Tr::kThreads>(p, at, place.length);
}

}  // namespace deltic::gpu::decode
