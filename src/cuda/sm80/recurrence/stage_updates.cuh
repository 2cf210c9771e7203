// What tokens do to the state, S <- decay S + k u^T, as rows of memory: written by decode instead
// of states, and applied again, by a tree's other branch and by commit. A row has k, u and the
// decays. The arithmetic is that of `step`: the same bits.
#pragma once

#include "cuda/sm80/recurrence/stage_states.cuh"
#include "cuda/tile/bounds.cuh"
#include "cuda/tile/updates.cuh"

namespace deltic::gpu::recurrence {

// k and decays of a token, by the warp that prepared it: in s.k and s.decay. Every CTA of a head
// has the same ones; the first one's count, and each one's own where branches read them again.
template <class Tr>
__device__ void store_keys(const Params& p, const Place& at, int64_t t, int warp, int lane,
                           const Stage<Tr>& s) {
  if (t >= at.span.length || !has_update(p, t)) return;
  if (at.first > 0 && !p.slots.parents.present) return;
  __syncwarp();  // the lanes' numbers are there
  float* row = update_row(p, 0, at.n, t, at.head);
  for (int d = lane; d < p.K; d += 32) {
    row[d] = s.k[warp][d];
    if constexpr (Tr::kPerChannel) row[p.K + p.V + d] = s.decay[warp][d];
  }
  if (!Tr::kPerChannel && p.gate == Gate::head && lane == 0) row[p.K + p.V] = s.decay[warp][0];
}

// u of a thread's columns, by the first of the lanes that have them.
__device__ inline void store_values(const Params& p, const Place& at, int64_t t, const Lanes& lanes,
                                    float2 u) {
  if (lanes.lane_k != 0 || !has_update(p, t)) return;
  float* row = update_row(p, 0, at.n, t, at.head) + p.K + at.first + lanes.column;
  if (lanes.columns_left > 0) row[0] = u.x;
  if (lanes.columns_left > 1) row[1] = u.y;
}

// One token's update once more.
template <class Tr>
__device__ void apply(const Params& p, const float* row, const Slice& at, const Lanes& lanes,
                      StateTile<Tr::kBlocks>& S) {
  float u[kThreadColumns];
#pragma unroll
  for (int c = 0; c < kThreadColumns; ++c) {
    u[c] = c < lanes.columns_left ? row[p.K + at.first + lanes.column + c] : 0.0f;
  }
  // Which channels there are is no matter of the loop around this.
  const int first = opaque(4 * lanes.lane_k);
  const float* decays = row + p.K + p.V;
  const float one = !Tr::kPerChannel && p.gate == Gate::head ? decays[0] : 1.0f;
#pragma unroll
  for (int i = 0; i < Tr::kBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int d = 32 * i + first + e;
      const float k = d < p.K ? row[d] : 0.0f;
      float decay = one;
      if constexpr (Tr::kPerChannel) decay = d < p.K ? decays[d] : 1.0f;
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        S[i][e][c] = updated<Tr::kPerChannel>(S[i][e][c], decay, k, u[c]);
      }
    }
  }
}

// The tokens from a root to `last`, a bit for each: parents come before their tokens, so that they
// are in order. Of lists that are wrong some such tokens.
__device__ inline unsigned path_to(const SlotLists& slots, int64_t n, int64_t last) {
  unsigned path = 0;
  for (int64_t t = last; t >= 0 && t < kMaxDrafts;) {
    path |= 1u << t;
    const int64_t parent = slots.parents.present ? parent_of(slots, n, t) : t - 1;
    if (parent >= t) break;
    t = parent;
  }
  return path;
}
template <class Tr>
__device__ void apply_path(const Params& p, int64_t layer, const Slice& at, unsigned path,
                           const Lanes& lanes, StateTile<Tr::kBlocks>& S) {
#pragma unroll 1
  for (unsigned rest = path; rest != 0; rest &= rest - 1) {
    apply<Tr>(p, update_row(p, layer, at.n, __ffs(static_cast<int>(rest)) - 1, at.head), at, lanes,
              S);
    if (p.rounded_to != DType::f32) round_state(p.rounded_to, S);
  }
}

// The state of a tree's other branch, and of the first token where nobody has loaded it: from the
// start, along the rows that this CTA has written. The same for all its threads.
template <class Tr>
__device__ void start_token(const Params& p, const Place& at, int64_t t, const Lanes& lanes,
                            StateTile<Tr::kBlocks>& S) {
  const int64_t parent = p.slots.parents.present ? parent_of(p.slots, at.n, t) : t - 1;
  if (parent == t - 1 && (Tr::kLoadsFirst || t > 0)) return;
  __syncthreads();  // all threads' rows of the tokens before are there
  load_initial<Tr>(p, at, at.read_slot, lanes, S);
  apply_path<Tr>(p, 0, at, path_to(p.slots, at.n, min(parent, t - 1)), lanes, S);
}

// Commit: one CTA per (layer, sequence, value head, 64 value columns).
template <class Tr>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    commit_kernel(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const auto num_sequences = static_cast<unsigned>(p.tokens.N);
  const unsigned job = blockIdx.x / p.num_slices, state = job / p.HV, layer = state / num_sequences;
  Slice at;
  at.n = state - layer * num_sequences, at.head = job - state * p.HV;
  at.first = static_cast<int64_t>(blockIdx.x - job * p.num_slices) * kColumns;
  at.count = static_cast<int>(min(static_cast<int64_t>(kColumns), p.V - at.first));
  const Slots<int64_t> slots = find_slots<int64_t>(p.slots, at.n);
  if (slots.to < 0) return;
  const int lane = threadIdx.x % 32;
  const int column =
      static_cast<int>(threadIdx.x) / 32 * kWarpColumns + lane / kLanesK * kThreadColumns;
  const Lanes lanes{lane % kLanesK, column, at.count - column};
  const auto of_layer = [&](States x) {
    x.data = static_cast<char*>(x.data) + layer * x.s_layer * number_bytes(x.dtype);
    return x;
  };
  StateTile<Tr::kBlocks> S;
  load_state<Tr>(p, at, of_layer(p.state_in), p.in_whole, slots.from, lanes, S);
  const int64_t last = min(load_index(p.accepted, at.n), p.update_tokens) - 1;
  apply_path<Tr>(p, layer, at, path_to(p.slots, at.n, last), lanes, S);
  const TileView view = view_of(at, lanes, of_layer(p.state_out), p.out_whole, slots.to);
  store_state<Tr>(p, lanes, view, S);
}

}  // namespace deltic::gpu::recurrence
