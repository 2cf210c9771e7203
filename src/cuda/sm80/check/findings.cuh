// Findings as keys, and what a call says of slots and lists, read on the device.
#pragma once

#include "cuda/sm80/check/params.h"
#include "cuda/tile/search.cuh"

namespace deltic::gpu::check {

inline constexpr int kThreads = 256;

// Classes in the order in which the CPU checks them; the position orders findings of a class and
// says where they are. All of it fits 60 bits: positions are below rows * heads * 16.
enum Class : unsigned {
  kLengths,
  kFrom,
  kAccepted,
  kPool,
  kTwice,
  kRead,
  kParents,
  kLists,
  kListTwice,
  kListRead,
  kParam,
  kValue,
  kSum
};
inline constexpr int kPerHead = CheckedInputs::kMaxRows + 1;  // positions of a head's rows

__device__ inline void report(const Params& p, Class which, int64_t position) {
  const auto key =
      static_cast<unsigned long long>(which) << 60 | static_cast<unsigned long long>(position);
  atomicMin(&p.record->key, key);
}

struct Walk {  // of all threads, or of all warps
  int64_t first, step;
};
__device__ inline Walk threads() {
  return {static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
          static_cast<int64_t>(gridDim.x) * kThreads};
}
__device__ inline Walk warps() {
  const Walk all = threads();
  return {all.first / 32, all.step / 32};
}

__device__ inline bool has_indices(const Params& p) {
  return p.slots.is_pool && p.slots.read.present;
}
// The list or table that says where states go.
__device__ inline Argument written_name(const Params& p) {
  return p.has_write_list ? Argument::write_index : Argument::read_index;
}
// Writers are numbered: sequence times columns plus token.
__device__ inline int64_t num_columns(const Params& p) {
  return p.slots.per_token ? p.slots.write.n1 : 1;
}
__device__ inline int64_t num_writes(const Params& p, int64_t n) {
  if (p.has_record) return 0;
  return p.slots.per_token ? min(span_of(p.tokens, n).length, p.slots.write.n1) : 1;
}
__device__ inline int64_t written_slot(const Params& p, int64_t n, int64_t t) {
  return p.slots.per_token ? token_slot(p.slots, n, t) : find_slots<int64_t>(p.slots, n).to;
}
// Slots that null_slot says are none need not be there.
__device__ inline bool is_slot(const Params& p, int64_t slot, int64_t slots) {
  return slot >= -1 && (slot < slots || slot <= p.slots.null_slot);
}
// A sequence that is skipped: nobody reads its rows.
__device__ inline bool is_padding(const Params& p, int64_t n) {
  return is_skipped(p.slots, n, span_of(p.tokens, n).length, find_slots<int64_t>(p.slots, n));
}
// Whether no list names a slot of a sequence: then nobody looks at its count of accepted tokens.
__device__ inline bool has_no_slots(const Params& p, int64_t n) {
  const SlotLists& x = p.slots;
#pragma unroll 1
  for (int64_t i = 0; i < max(x.read.n1, int64_t{1}) + max(x.write.n1, int64_t{1}); ++i) {
    const int64_t column = i - max(x.read.n1, int64_t{1});
    const Indices& list = column < 0 ? x.read : x.write;
    const int64_t slot = load_index(list, n, column < 0 ? i : column);
    if (named_slot(slot, x.null_slot, column < 0 ? x.read_slots : x.write_slots) >= 0) return false;
  }
  return true;
}
__device__ inline bool is_accepted(const Params& p, int64_t n) {
  const int64_t accepted = load_index(p.slots.accepted, n);
  return accepted >= 1 && accepted <= p.slots.read.n1;
}
// Counts of accepted tokens, and windows that are too short for the tokens of a call.
__device__ inline bool is_in_window(const Params& p, int64_t n) {
  const int64_t accepted = load_index(p.window, n);
  return accepted >= 1 && accepted <= p.most;
}
__device__ inline void check_window(const Params& p, int64_t n) {
  const bool is_right = is_in_window(p, n);
  if (is_right && span_of(p.tokens, n).length <= p.most) return;
  if (p.slots.read.present && has_no_slots(p, n)) return;
  report(p, kAccepted, 2 * n + (is_right ? 1 : 0));
}
// Of commit: how many tokens of the record count.
__device__ inline bool is_committed(const Params& p, int64_t n) {
  const int64_t accepted = load_index(p.accepted, n);
  return accepted >= 0 && accepted <= p.update_tokens;
}
__device__ inline void check_committed(const Params& p, int64_t n) {
  if (is_committed(p, n) || (p.slots.read.present && has_no_slots(p, n))) return;
  report(p, kAccepted, 2 * n);
}
// Whether number i of the state that a sequence starts from is read.
__device__ inline bool is_read(const Params& p, int64_t n, int64_t i) {
  if (!p.window.present || span_of(p.tokens, n).length == 0) return true;
  const int64_t end = clamp_index(load_index(p.window, n), 1, p.most) + p.taps - 2, at = i % p.V;
  return at > end - p.taps && at < end;
}
__device__ inline int64_t read_column(const Params& p, int64_t n) {
  return p.slots.accepted.present ? load_index(p.slots.accepted, n) - 1 : 0;
}
__device__ inline int64_t start_slot(const Params& p, int64_t n) {
  return find_slots<int64_t>(p.slots, n).from;
}

struct List {
  int64_t begin, end;
};
__device__ inline List checkpoints_of(const Params& p, int64_t n) {
  const int64_t M = p.ckpt_tokens.n0, begin = clamp_index(load_index(p.ckpt_cu, n), 0, M);
  return {begin, clamp_index(load_index(p.ckpt_cu, n + 1), begin, M)};
}
__device__ inline int64_t checkpoint_slot(const Params& p, int64_t m) {
  return named_slot(load_index(p.ckpt_slots, m), p.slots.null_slot, p.ckpt_num_slots);
}
// Writers of checkpoints and, where they go to the pool, of states, by sequence: first states.
__device__ inline int64_t list_writers(const Params& p) {
  return num_columns(p) + p.ckpt_tokens.n0;
}
// f(number, slot, whether it is a checkpoint) of every one of a sequence that has a slot.
template <class F>
__device__ void for_list_writers(const Params& p, int64_t n, F&& f) {
  const int64_t first = n * list_writers(p);
  if (p.is_ckpt_in_pool) {
#pragma unroll 1
    for (int64_t t = 0; t < num_writes(p, n); ++t) {
      if (const int64_t slot = written_slot(p, n, t); slot >= 0) f(first + t, slot, false);
    }
  }
  const List list = checkpoints_of(p, n);
#pragma unroll 1
  for (int64_t m = list.begin; m < list.end; ++m) {
    const int64_t slot = checkpoint_slot(p, m);
    if (slot >= 0) f(first + num_columns(p) + m, slot, true);
  }
}
// Positions of a sequence's checkpoint list: its offset, then slot and token of every entry.
__device__ inline int64_t list_position(const Params& p, int64_t n) {
  return 1 + n * (2 * p.ckpt_tokens.n0 + 1);
}

}  // namespace deltic::gpu::check
