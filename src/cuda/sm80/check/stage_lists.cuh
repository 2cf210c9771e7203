// Lengths, slots, trees and checkpoint lists of a sequence, by a thread.
#pragma once

#include "cuda/sm80/check/findings.cuh"

namespace deltic::gpu::check {

__device__ inline void check_length(const Params& p, int64_t n) {
  if (load_index(p.tokens.cu, n + 1) < load_index(p.tokens.cu, n)) report(p, kLengths, 1 + n);
}
// The token from which a sequence is recurrent.
__device__ inline void check_from(const Params& p, int64_t n) {
  const int64_t from = load_index(p.recurrent_from, n);
  if (from < 0 || from > span_of(p.tokens, n).length) report(p, kFrom, n);
}
// The ends, which are there without a sequence too.
__device__ inline void check_ends(const Params& p) {
  if (p.tokens.packed) {
    if (load_index(p.tokens.cu, 0) != 0) report(p, kLengths, 0);
    if (load_index(p.tokens.cu, p.tokens.N) > p.tokens.T) report(p, kLengths, 1 + p.tokens.N);
  }
  if (p.ckpt_cu.present && load_index(p.ckpt_cu, 0) != 0) report(p, kLists, 0);
}

__device__ inline void check_slots(const Params& p, int64_t n) {
  const SlotLists& x = p.slots;
  const int64_t columns = num_columns(p), position = n * (columns + 2);
  if (x.per_token && span_of(p.tokens, n).length > x.write.n1) report(p, kPool, position);
  if (x.accepted.present && !is_accepted(p, n)) {
    if (!has_no_slots(p, n)) report(p, kAccepted, 2 * n);
  } else if (p.has_read_list &&
             !is_slot(p, load_index(x.read, n, read_column(p, n)), x.read_slots)) {
    report(p, kPool, position + 1);
  }
#pragma unroll 1
  for (int64_t t = 0; t < num_writes(p, n); ++t) {
    if (!is_slot(p, load_index(x.write, n, t), x.write_slots)) report(p, kPool, position + 2 + t);
    if (const int64_t slot = written_slot(p, n, t); slot >= 0) {
      atomicMin(&p.pool_owner[slot], static_cast<unsigned long long>(n * columns + t));
    }
  }
}

// Trees: every parent comes before its token and has a slot to start from; the start is still there
// for a later branch. Positions: two of the sequence, then two of every token.
inline constexpr int64_t kPerTree = 2 + 2 * kMaxDrafts;
__device__ inline int64_t token_over_start(const Params& p, int64_t n, int64_t t) {
  const int64_t start = start_slot(p, n);
  for (int64_t i = 0; i < t && start >= 0 && !p.has_write_pool && !p.has_record; ++i) {
    if (token_slot(p.slots, n, i) == start) return i;
  }
  return -1;
}
// Of commit: the tokens that the last accepted one comes from.
__device__ inline void check_path(const Params& p, int64_t n) {
  if (!is_committed(p, n) || (p.slots.read.present && has_no_slots(p, n))) return;
#pragma unroll 1
  for (int64_t t = load_index(p.accepted, n) - 1; t >= 0;) {
    const int64_t parent = load_index(p.slots.parents, n, t);
    if (parent < -1 || parent >= t) return report(p, kParents, n * kPerTree + 2 + 2 * t + 1);
    t = parent;
  }
}
__device__ inline void check_parents(const Params& p, int64_t n) {
  const int64_t length = span_of(p.tokens, n).length, position = n * kPerTree;
  if (length > kMaxDrafts) return report(p, kParents, position);
  if (length > p.slots.parents.n1) return report(p, kParents, position + 1);
  if (is_padding(p, n)) return;
#pragma unroll 1
  for (int64_t t = 0; t < length; ++t) {
    const int64_t parent = load_index(p.slots.parents, n, t);
    const bool is_before = parent >= -1 && parent < t;
    if (parent < 0 && token_over_start(p, n, t) >= 0) report(p, kParents, position + 2 + 2 * t);
    if (!is_before ||
        (parent >= 0 && parent < t - 1 && !p.has_record && token_slot(p.slots, n, parent) < 0)) {
      report(p, kParents, position + 3 + 2 * t);
    }
  }
}

__device__ inline void check_checkpoints(const Params& p, int64_t n) {
  const int64_t from = load_index(p.ckpt_cu, n), to = load_index(p.ckpt_cu, n + 1);
  const int64_t position = list_position(p, n), length = span_of(p.tokens, n).length;
  if (to < from || to > p.ckpt_tokens.n0) report(p, kLists, position);
  const List list = checkpoints_of(p, n);
#pragma unroll 1
  for (int64_t m = list.begin; m < list.end; ++m) {
    const int64_t tokens = load_index(p.ckpt_tokens, m);
    if (!is_slot(p, load_index(p.ckpt_slots, m), p.ckpt_num_slots)) {
      report(p, kLists, position + 1 + 2 * m);
    } else if (checkpoint_slot(p, m) >= 0 && (tokens < 0 || tokens > length)) {
      report(p, kLists, position + 2 + 2 * m);
    }
  }
  for_list_writers(p, n, [&](int64_t writer, int64_t slot, bool is_checkpoint) {
    const auto owner = static_cast<unsigned long long>(writer);
    atomicMin(&p.list_owner[slot], owner);
    if (p.is_ckpt_in_pool && is_checkpoint) atomicMin(&p.ckpt_owner[slot], owner);
  });
}

}  // namespace deltic::gpu::check
