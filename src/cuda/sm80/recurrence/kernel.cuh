// The recurrence, token by token in fp32, for every forward and decode call: one CTA per (sequence,
// value head, 64 value columns), the state in registers, tokens in stages of eight.
#pragma once

#include <cuda/std/limits>

#include "cuda/sm80/recurrence/stage_updates.cuh"
#include "cuda/tile/bounds.cuh"

namespace deltic::gpu::recurrence {

__device__ inline int64_t checkpoint_slot(const Params& p, int64_t m) {
  return named_slot(load_index(p.ckpt_slots, m), p.slots.null_slot, p.ckpt.slots);
}

// The smallest token count >= `tokens` with a checkpoint. The list may be in any order; looking
// through it once per checkpoint rather than once per token keeps long sequences cheap.
template <class Count>
__device__ Count checkpoint_from(const Params& p, const Place& at, Count tokens) {
  Count next = cuda::std::numeric_limits<Count>::max();
  for (int64_t m = at.ckpt_begin; m < at.ckpt_end; ++m) {
    const int64_t count = load_index(p.ckpt_tokens, m);
    if (count >= tokens && count < next && checkpoint_slot(p, m) >= 0) {
      next = static_cast<Count>(count);
    }
  }
  return next;
}

__device__ inline void find_states(const Params& p, Place& at) {
  const Slots<int64_t> slots = find_slots<int64_t>(p.slots, at.n);
  at.read_slot = slots.from, at.write_slot = slots.to;
  at.ckpt_begin = at.ckpt_end = 0;
  at.skipped = is_skipped(p.slots, at.n, at.span.length, slots);
  if (p.ckpt_cu.present) {
    const int64_t M = p.ckpt_tokens.n0;
    at.ckpt_begin = clamp_index(load_index(p.ckpt_cu, at.n), 0, M);
    at.ckpt_end = clamp_index(load_index(p.ckpt_cu, at.n + 1), at.ckpt_begin, M);
  }
}

// index: (sequence, value head, slice), slices fastest.
__device__ inline Slice find_slice(const Params& p, unsigned index) {
  const unsigned job = index / p.num_slices, n = job / p.HV;
  Slice at;
  at.n = n, at.head = job - n * p.HV;
  at.first = static_cast<int64_t>(index - job * p.num_slices) * kColumns;
  at.count = static_cast<int>(min(static_cast<int64_t>(kColumns), p.V - at.first));
  return at;
}

// One thread of each of two warps works, so that their trips to memory overlap.
__device__ inline void find_place(const Params& p, const Slice& slice, Place& at) {
  if (threadIdx.x == 0) {
    at.rate = p.A_log.present ? gate_rate(load_param(p.A_log, slice.head)) : 1.0f;
  }
  if (threadIdx.x == 32) {
    static_cast<Slice&>(at) = slice;
    at.k_head = slice.head / p.group;
    at.span = span_of(p.tokens, at.n);
    find_states(p, at);
  }
}

// The next token count at which a state is to be written.
template <class Count>
__device__ Count next_keep(const Params& p, const Place& at, Count tokens, Count next_checkpoint) {
  const Count next_state = p.slots.per_token ? tokens + 1 : static_cast<Count>(at.span.length);
  return min(next_state, next_checkpoint);
}

// Writes the state after `tokens` tokens wherever it is wanted. next_checkpoint: the next count
// with one.
template <class Tr, class Count>
__device__ void keep(const Params& p, const Place& at, const Lanes& lanes, Count tokens,
                     Count& next_checkpoint, const StateTile<Tr::kBlocks>& S) {
  int64_t slot = tokens == at.span.length ? at.write_slot : -1;
  if (p.slots.per_token && tokens > 0) slot = token_slot<int64_t>(p.slots, at.n, tokens - 1);
  const bool is_checkpoint = tokens == next_checkpoint;
  // One place that stores, for the last state (m = begin - 1) and for checkpoints.
  const int64_t end = is_checkpoint ? at.ckpt_end : at.ckpt_begin;
  for (int64_t m = at.ckpt_begin - 1; m < end; ++m) {
    const bool is_last = m < at.ckpt_begin;
    if (!is_last) {
      slot = load_index(p.ckpt_tokens, m) == tokens ? checkpoint_slot(p, m) : -1;
    }
    if (slot < 0) continue;
    const TileView view = is_last ? view_of(at, lanes, p.state_out, p.out_whole, slot)
                                  : view_of(at, lanes, p.ckpt, p.ckpt_whole, slot);
    store_state<Tr>(p, lanes, view, S);
  }
  if (is_checkpoint) next_checkpoint = checkpoint_from<Count>(p, at, tokens + 1);
}

__device__ inline void zero_outputs(const Params& p, const Place& at) {
  if (!p.o.present) return;
  for (int64_t i = threadIdx.x; i < at.span.length * at.count; i += kThreads) {
    const int64_t row = offset(p.o, at.span.batch, at.span.begin + i / at.count, at.head);
    store(p.o.data, p.o.dtype, row + at.first + i % at.count, 0.0f);
  }
}

// kOneStage: S is under way.
template <class Tr>
__device__ void run_slice(const Params& p, Stage<Tr>& s, const Lanes& lanes,
                          StateTile<Tr::kBlocks>& S) {
  const Place& at = s.place;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!Tr::kOneStage && Tr::kLoadsFirst) load_initial<Tr>(p, at, at.read_slot, lanes, S);
  RawToken<Tr> raw{};
  load_token<Tr>(p, at, warp, lane, raw);
  const auto lay_stage = [&](int64_t first) {
    // Nothing is loaded ahead either where a branch needs the registers.
    if (Tr::kRecord && first > 0) load_token<Tr>(p, at, first + warp, lane, raw);
    finish_token<Tr>(p, at, first + warp, warp, lane, raw, s);
    if constexpr (Tr::kRecord) store_keys<Tr>(p, at, first + warp, warp, lane, s);
    if constexpr (!Tr::kOneStage && !Tr::kRecord) {
      load_token<Tr>(p, at, first + kStageTokens + warp, lane, raw);
    }
    __syncthreads();  // the stage is there, o has been read
  };
  if constexpr (Tr::kOneStage) lay_stage(0);
  // Tokens of one stage need no 64 bits; the registers are wanted elsewhere.
  using Count = std::conditional_t<Tr::kOneStage, int, int64_t>;
  Count next_checkpoint = checkpoint_from<Count>(p, at, 0);
  Count next = next_keep<Count>(p, at, 0, next_checkpoint);
  const Count length = static_cast<Count>(at.span.length);
  // The state after `tokens` tokens is in S. Every kStageTokens a new stage is laid out.
  for (Count tokens = 0;; ++tokens) {
    if (tokens > 0) {
      if constexpr (Tr::kRecord) {
        const bool is_start = !Tr::kLoadsFirst && tokens == 1;
        if (is_start || p.slots.parents.present) start_token<Tr>(p, at, tokens - 1, lanes, S);
      } else if constexpr (!Tr::kOneStage) {
        if (p.slots.parents.present) load_branch<Tr>(p, at, tokens - 1, lanes, S);
      }
      const float2 u =
          step<Tr>(s, static_cast<int>((tokens - 1) % kStageTokens), lanes, p.gv.present, S);
      if constexpr (Tr::kRecord) store_values(p, at, tokens - 1, lanes, u);
      if (p.rounded_to != DType::f32) {
        if constexpr (Tr::kOneStage || Tr::kRecord) {
          round_state(p.rounded_to, S);
        } else {
          p.has_seed ? round_state_by_chance(p, at, tokens - 1, lanes, S)
                     : round_state(p.rounded_to, S);
        }
      }
    }
    if (!Tr::kRecord && tokens == next) {
      keep<Tr, Count>(p, at, lanes, tokens, next_checkpoint, S);
      next = next_keep<Count>(p, at, tokens, next_checkpoint);
    }
    const bool is_end = tokens == length;
    if (!is_end && (Tr::kOneStage || tokens % kStageTokens != 0)) continue;
    __syncthreads();  // o of the stage before is complete
    if (tokens > 0) {
      store_o<Tr>(p, at, (tokens - 1) / kStageTokens * kStageTokens + warp, warp, lane, s);
    }
    if (is_end) return;
    if constexpr (!Tr::kOneStage) lay_stage(tokens);
  }
}

// CTAs are (sequence, value head, slice), slices fastest; the last kPaddingCtas of a packed call
// write zeros to the rows of no sequence.
template <class Tr>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    recurrence_kernel(const __grid_constant__ Params p) {
  __shared__ Stage<Tr> s;
  if (is_wrong(p.tokens)) return;
  if (is_past_slices(p)) return;
  const Slice slice = find_slice(p, blockIdx.x);
  const int lane = threadIdx.x % 32;
  const int column =
      static_cast<int>(threadIdx.x) / 32 * kWarpColumns + lane / kLanesK * kThreadColumns;
  const Lanes lanes{lane % kLanesK, column, slice.count - column};
  StateTile<Tr::kBlocks> S;
  // With few tokens the state is nearly all there is to move: it goes first.
  if constexpr (Tr::kOneStage) {
    load_initial<Tr>(p, slice, find_slots<int64_t>(p.slots, slice.n).from, lanes, S);
  }
  find_place(p, slice, s.place);
  load_bias<Tr>(p, slice.head, s);
  __syncthreads();  // place and dt_bias are known
  s.place.skipped ? zero_outputs(p, s.place) : run_slice<Tr>(p, s, lanes, S);
  if constexpr (Tr::kRecord) {
    store_rest<kThreads>(p, s.place, s.place.skipped ? 0 : s.place.span.length);
  }
}

}  // namespace deltic::gpu::recurrence
