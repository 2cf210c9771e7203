// Checked mode: lists, then values, each finding a key of 64 bits that orders it; the least stays,
// whoever comes first. Then the finding in full.
#pragma once

#include "cuda/sm80/check/params.h"

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

// Lengths, slots and lists in range; who writes which slot.
__global__ void __launch_bounds__(kThreads, 1) check_lists(const __grid_constant__ Params p) {
  const Walk all = threads();
  if (all.first == 0) check_ends(p);
#pragma unroll 1
  for (int64_t n = all.first; n < p.tokens.N; n += all.step) {
    if (p.tokens.packed) check_length(p, n);
    if (p.recurrent_from.present) check_from(p, n);
    if (p.window.present) check_window(p, n);
    if (p.accepted.present) check_committed(p, n);
    if (p.has_record && span_of(p.tokens, n).length > p.update_tokens) {
      report(p, kAccepted, 2 * n + 1);
    }
    if (has_indices(p)) check_slots(p, n);
    if (p.slots.parents.present) p.accepted.present ? check_path(p, n) : check_parents(p, n);
    if (p.ckpt_cu.present) check_checkpoints(p, n);
  }
}

// Behind check_lists: no slot twice, none read that another sequence writes.
__device__ inline void check_owners(const Params& p, int64_t n) {
  if (has_indices(p)) {
    const int64_t columns = num_columns(p);
    for (int64_t t = 0; t < num_writes(p, n); ++t) {
      const int64_t slot = written_slot(p, n, t);
      if (slot >= 0 && p.pool_owner[slot] != n * columns + t) report(p, kTwice, slot);
    }
    if (p.has_two_lists && !p.has_write_pool) {
      const int64_t slot = start_slot(p, n);
      const unsigned long long owner = slot >= 0 ? p.pool_owner[slot] : ~0ull;
      if (owner != ~0ull && owner / columns != n) report(p, kRead, n);
    }
  }
  if (p.ckpt_cu.present) {
    for_list_writers(p, n, [&](int64_t writer, int64_t slot, bool) {
      if (p.list_owner[slot] != writer) report(p, kListTwice, slot);
    });
    const int64_t start = p.is_ckpt_in_pool && !p.has_write_pool ? start_slot(p, n) : -1;
    if (start >= 0 && p.ckpt_owner[start] != ~0ull) report(p, kListRead, n);
  }
}

// A sequence has a line for its states and one for each token, all in order.
__device__ inline int64_t first_line(const Params& p, int64_t n) {
  return n + (p.tokens.packed ? span_of(p.tokens, n).begin : n * p.tokens.T);
}
__device__ inline int64_t sequence_of_line(const Params& p, int64_t line) {
  if (!p.tokens.packed) return line / (p.tokens.T + 1);
  int64_t n = 0, end = p.tokens.N;  // the sequence is in [n, end)
  while (end - n > 1) {
    const int64_t middle = (n + end) / 2;
    (first_line(p, middle) <= line ? n : end) = middle;
  }
  return n;
}
__device__ inline int64_t line_position(const Params& p, int64_t line) {
  return line * p.HV * kPerHead;
}

// Number i of a state, channels before columns.
__device__ inline float state_number(const Params& p, const States& x, int64_t slot, int64_t head,
                                     int64_t i) {
  return load(x.data, x.dtype,
              head / p.heads * x.s_layer + slot * x.s_slot + head % p.heads * x.s_head +
                  i / p.V * x.s_k + i % p.V * x.s_v);
}
__device__ inline int64_t state_slot(const Params& p, int which, int64_t n) {
  const States& x = which == 0 ? p.state_in : p.d_final;
  if (!x.present) return -1;
  return which == 1 ? n : start_slot(p, n);
}
__device__ inline int64_t row_width(const Params& p, const CheckedRows& x, int64_t t) {
  return x.diagonal < 0 ? x.width : t % p.chunk + x.diagonal;
}

// Rows of a token and head; those of layers are the record's.
__device__ inline int64_t row_offset(const Params& p, const CheckedRows& x, const Span& span,
                                     int64_t t, int64_t head) {
  return offset(x.rows, span.batch, span.begin + t, head % p.heads) +
         head / p.heads * p.update_layer;
}

// By a warp: the state of a sequence and head; the rows of a token and head.
__device__ inline void check_state(const Params& p, int64_t n, int64_t head, int lane) {
  for (int which = 0; which < 2; ++which) {
    const int64_t slot = state_slot(p, which, n);
    if (slot < 0) continue;
    const States& x = which == 0 ? p.state_in : p.d_final;
    for (int64_t i = lane; i < p.K * p.V; i += 32) {
      if (which == 0 && !is_read(p, n, i)) continue;
      if (isfinite(state_number(p, x, slot, head, i))) continue;
      report(p, kValue, line_position(p, first_line(p, n)) + which * p.HV + head);
      break;
    }
  }
}
__device__ inline void check_rows(const Params& p, int64_t n, int64_t t, int64_t head, int lane) {
  const Span span = span_of(p.tokens, n);
  for (int input = 0; input < p.inputs.num_rows; ++input) {
    const CheckedRows& x = p.inputs.rows[input];
    if (head % p.heads >= x.heads) continue;
    const int64_t at = row_offset(p, x, span, t, head);
    for (int64_t c = lane; c < row_width(p, x, t); c += 32) {
      if (isfinite(load(x.rows.data, x.rows.dtype, at + c))) continue;
      report(p, kValue, line_position(p, first_line(p, n) + 1 + t) + head * kPerHead + input);
      break;
    }
  }
}

// The sum of a chunk's positive log decays up to token t; the CPU adds in the same order.
__device__ inline double gate_sum(const Params& p, const Span& span, int64_t t, int64_t head,
                                  int64_t channel) {
  double sum = 0;
  for (int64_t i = t / p.chunk * p.chunk; i <= t; ++i) {
    const int64_t at = offset(p.g, span.batch, span.begin + i, head) + channel;
    sum += fmax(0.0, static_cast<double>(load(p.g.data, p.g.dtype, at)));
  }
  return sum;
}
__device__ inline void check_sums(const Params& p, int64_t n, int64_t first, int64_t head,
                                  int64_t channel) {
  const Span span = span_of(p.tokens, n);
  double sum = 0;
  for (int64_t t = first; t < min(first + p.chunk, span.length); ++t) {
    const int64_t at = offset(p.g, span.batch, span.begin + t, head) + channel;
    sum += fmax(0.0, static_cast<double>(load(p.g.data, p.g.dtype, at)));
    if (!(sum >= kMaxGateSum)) continue;
    report(p, kSum, ((n * p.HV + head) * p.gate_width + channel) * p.tokens.T + t);
    return;
  }
}

__global__ void __launch_bounds__(kThreads, 4) check_values(const __grid_constant__ Params p) {
  const Walk all = threads(), by_warp = warps();
  const int lane = threadIdx.x % 32;
  for (int64_t n = all.first; n < p.tokens.N; n += all.step) check_owners(p, n);
  int64_t before = 0;
  for (int i = 0; i < p.inputs.num_params; ++i) {
    const CheckedParam& x = p.inputs.params[i];
    for (int64_t j = all.first; j < x.count; j += all.step) {
      if (!isfinite(load_param(x.param, j))) report(p, kParam, before + j);
    }
    before += x.count;
  }
  if (p.state_in.present || p.d_final.present) {
    for (int64_t i = by_warp.first; i < p.tokens.N * p.HV; i += by_warp.step) {
      check_state(p, i / p.HV, i % p.HV, lane);
    }
  }
  // Lines of tokens, padding left out.
  const int64_t lines = p.tokens.packed ? padding_begin(p.tokens) : p.B * p.tokens.T;
  for (int64_t i = by_warp.first; i < lines * p.HV; i += by_warp.step) {
    const int64_t row = i / p.HV;
    int64_t n = 0, t = row;
    if (!p.tokens.packed) {
      n = row / p.tokens.T, t = row % p.tokens.T;
    } else {
      int64_t end = p.tokens.N;  // the last sequence that begins at or before the row
      while (end - n > 1) {
        const int64_t middle = (n + end) / 2;
        (span_of(p.tokens, middle).begin <= row ? n : end) = middle;
      }
      t = row - span_of(p.tokens, n).begin;
      if (t < 0 || t >= span_of(p.tokens, n).length) continue;  // offsets that decrease
    }
    if (is_padding(p, n)) continue;
    check_rows(p, n, t, i % p.HV, lane);
    // A lane per channel, once per chunk.
    if (!p.inputs.sums || t % p.chunk != 0) continue;
    for (int64_t c = lane; c < p.gate_width; c += 32) check_sums(p, n, t, i % p.HV, c);
  }
}

// The first i below count that has a property; count: none. By the whole CTA.
template <class F>
__device__ int64_t first_of(int64_t count, F&& has) {
  __shared__ unsigned long long s_first;
  __syncthreads();  // the one before has been read
  if (threadIdx.x == 0) s_first = static_cast<unsigned long long>(count);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    if (!has(i)) continue;
    atomicMin(&s_first, static_cast<unsigned long long>(i));
    break;
  }
  __syncthreads();  // all have looked
  return static_cast<int64_t>(s_first);
}

__device__ inline Finding describe_lengths(const Params& p, int64_t position) {
  const Indices& cu = p.tokens.cu;
  Finding f{.argument = Argument::cu_seqlens};
  if (position == 0) {
    f.wrong = Wrong::first_offset, f.got = load_index(cu, 0);
  } else if (position <= p.tokens.N) {
    f.wrong = Wrong::falling_offset, f.at = position, f.limit = -1;
    f.got = load_index(cu, position), f.other = load_index(cu, position - 1);
  } else {
    f.wrong = Wrong::last_offset, f.got = load_index(cu, p.tokens.N), f.limit = p.tokens.T;
  }
  return f;
}
__device__ inline Finding describe_from(const Params& p, int64_t n) {
  Finding f{.wrong = Wrong::token_of_sequence, .argument = Argument::recurrent_from, .sequence = n};
  f.got = load_index(p.recurrent_from, n), f.limit = span_of(p.tokens, n).length, f.at = n;
  return f;
}
// Positions: two of the sequence.
__device__ inline Finding describe_accepted(const Params& p, int64_t position) {
  const bool is_window = p.window.present;
  Finding f{.wrong = Wrong::accepted, .argument = Argument::accepted, .sequence = position / 2};
  f.limit = is_window ? p.most : p.accepted.present ? p.update_tokens : p.slots.read.n1;
  if (position % 2 == 1 && p.has_record) {
    f.wrong = Wrong::few_columns, f.argument = Argument::record;
    f.got = p.update_tokens, f.limit = span_of(p.tokens, f.sequence).length;
  } else if (position % 2 == 1) {
    f.wrong = Wrong::long_window, f.argument = Argument::x;
    f.got = span_of(p.tokens, f.sequence).length;
  } else {
    f.got = load_index(is_window            ? p.window
                       : p.accepted.present ? p.accepted
                                            : p.slots.accepted,
                       f.sequence);
  }
  return f;
}
__device__ inline Finding describe_slots(const Params& p, int64_t position) {
  const int64_t per = num_columns(p) + 2, n = position / per, item = position % per;
  Finding f{.wrong = Wrong::slot, .argument = written_name(p)};
  f.at = n, f.limit = p.slots.write_slots;
  if (item == 0) {
    f.wrong = Wrong::few_columns, f.sequence = n, f.at = 0;
    f.got = p.slots.write.n1, f.limit = span_of(p.tokens, n).length;
  } else if (item == 1) {
    f.argument = Argument::read_index, f.limit = p.slots.read_slots;
    f.got = load_index(p.slots.read, n, read_column(p, n));
  } else {
    f.got = load_index(p.slots.write, n, item - 2);
  }
  return f;
}
__device__ inline Finding describe_parents(const Params& p, int64_t position) {
  const int64_t n = position / kPerTree, item = position % kPerTree, t = (item - 2) / 2;
  const int64_t length = span_of(p.tokens, n).length;
  Finding f{.argument = Argument::parents, .sequence = n};
  if (item == 0) {
    f.wrong = Wrong::many_drafts, f.got = length;
    return f;
  }
  if (item == 1) {
    f.wrong = Wrong::few_columns, f.got = p.slots.parents.n1, f.limit = length;
    return f;
  }
  f.token = t;
  if (item % 2 == 0) {
    f.wrong = Wrong::start_overwritten;
    f.got = start_slot(p, n), f.other = token_over_start(p, n, t);
  } else {
    f.got = load_index(p.slots.parents, n, t);
    f.wrong = f.got >= -1 && f.got < t ? Wrong::parent_not_kept : Wrong::parent;
  }
  return f;
}
__device__ inline Finding describe_lists(const Params& p, int64_t position) {
  Finding f{.wrong = Wrong::falling_offset, .argument = Argument::ckpt_cu};
  if (position == 0) {
    f.wrong = Wrong::first_offset, f.got = load_index(p.ckpt_cu, 0);
    return f;
  }
  const int64_t per = 2 * p.ckpt_tokens.n0 + 1, n = (position - 1) / per;
  const int64_t item = (position - 1) % per, m = (item - 1) / 2;
  if (item == 0) {
    f.got = load_index(p.ckpt_cu, n + 1), f.other = load_index(p.ckpt_cu, n);
    f.limit = p.ckpt_tokens.n0, f.at = n + 1;
  } else if (item % 2 == 1) {
    f.wrong = Wrong::slot, f.argument = Argument::ckpt_slots, f.at = m;
    f.got = load_index(p.ckpt_slots, m), f.limit = p.ckpt_num_slots;
  } else {
    f.wrong = Wrong::token_of_sequence, f.argument = Argument::ckpt_tokens, f.at = m;
    f.sequence = n, f.got = load_index(p.ckpt_tokens, m);
    f.limit = span_of(p.tokens, n).length;
  }
  return f;
}
// The two lowest writers of a slot. By the whole CTA, as the ones below.
__device__ inline Finding describe_twice(const Params& p, int64_t slot) {
  const int64_t columns = num_columns(p), first = static_cast<int64_t>(p.pool_owner[slot]);
  const int64_t second = first_of(p.tokens.N * columns, [&](int64_t i) {
    return i != first && i % columns < num_writes(p, i / columns) &&
           written_slot(p, i / columns, i % columns) == slot;
  });
  return {.wrong = Wrong::written_twice,
          .argument = written_name(p),
          .sequence = first / columns,
          .got = slot,
          .other = second / columns};
}
__device__ inline Finding describe_list_twice(const Params& p, int64_t slot) {
  const int64_t per = list_writers(p), first = static_cast<int64_t>(p.list_owner[slot]);
  // The next lowest: the sequence that has it says which of its writers.
  const int64_t other = first_of(p.tokens.N, [&](int64_t n) {
    bool has = false;
    for_list_writers(p, n, [&](int64_t writer, int64_t at, bool) {
      has = has || (at == slot && writer != first);
    });
    return has;
  });
  Finding f{.wrong = Wrong::written_twice, .argument = Argument::ckpt_slots};
  f.got = slot, f.sequence = first / per, f.other = other;
  return f;
}
__device__ inline Finding describe_list_read(const Params& p, int64_t n) {
  const int64_t slot = start_slot(p, n);
  return {.wrong = Wrong::read_while_written,
          .argument = Argument::ckpt_slots,
          .sequence = n,
          .got = slot,
          .other = static_cast<int64_t>(p.ckpt_owner[slot]) / list_writers(p)};
}
__device__ inline Finding describe_read(const Params& p, int64_t n) {
  const int64_t slot = start_slot(p, n);
  return {.wrong = Wrong::read_while_written,
          .argument = Argument::read_index,
          .sequence = n,
          .got = slot,
          .other = static_cast<int64_t>(p.pool_owner[slot]) / num_columns(p)};
}
__device__ inline Finding describe_param(const Params& p, int64_t position) {
  Finding f{.wrong = Wrong::not_finite};
  for (int i = 0; i < p.inputs.num_params; ++i) {
    const CheckedParam& x = p.inputs.params[i];
    if (position < x.count) {
      f.argument = x.argument, f.value = load_param(x.param, position);
      (x.is_channel ? f.channel : f.head) = position / x.per_unit;
      break;
    }
    position -= x.count;
  }
  return f;
}
__device__ inline Finding describe_value(const Params& p, int64_t position) {
  const int64_t per = p.HV * kPerHead, line = position / per, item = position % per;
  const int64_t n = sequence_of_line(p, line), t = line - first_line(p, n) - 1;
  Finding f{.wrong = Wrong::not_finite, .sequence = n};
  if (t < 0) {
    const int which = item < p.HV ? 0 : 1;
    const States& x = which == 0 ? p.state_in : p.d_final;
    const int64_t slot = state_slot(p, which, n), head = item - which * p.HV;
    const int64_t i = first_of(p.K * p.V, [&](int64_t j) {
      return (which == 1 || is_read(p, n, j)) && !isfinite(state_number(p, x, slot, head, j));
    });
    f.argument = which == 1        ? Argument::d_final_state
                 : p.slots.is_pool ? Argument::state_pool
                                   : Argument::initial_state;
    f.head = head % p.heads, f.layer = p.HV > p.heads ? head / p.heads : -1;
    f.value = state_number(p, x, slot, head, min(i, p.K * p.V - 1));
    return f;
  }
  const int64_t head = item / kPerHead;
  const CheckedRows& x = p.inputs.rows[item % kPerHead];
  const Span span = span_of(p.tokens, n);
  const int64_t at = row_offset(p, x, span, t, head), width = row_width(p, x, t);
  const int64_t c = first_of(
      width, [&](int64_t j) { return !isfinite(load(x.rows.data, x.rows.dtype, at + j)); });
  f.argument = x.argument, f.token = t, f.head = head % p.heads;
  f.layer = p.HV > p.heads ? head / p.heads : -1;
  f.value = load(x.rows.data, x.rows.dtype, at + min(c, width - 1));
  return f;
}
__device__ inline Finding describe_sum(const Params& p, int64_t position) {
  const int64_t t = position % p.tokens.T, column = position / p.tokens.T;
  const int64_t channel = column % p.gate_width, job = column / p.gate_width;
  const int64_t n = job / p.HV, head = job % p.HV;
  return {.wrong = Wrong::growing_gate,
          .argument = Argument::g,
          .sequence = n,
          .token = t,
          .head = head,
          .value = gate_sum(p, span_of(p.tokens, n), t, head, channel)};
}

// One CTA, behind the checks: what the least key means.
__global__ void __launch_bounds__(kThreads, 1) describe(const __grid_constant__ Params p) {
  const unsigned long long key = p.record->key;
  const auto position = static_cast<int64_t>(key & ((1ull << 60) - 1));
  Finding f;
  if (key != ~0ull) {
    switch (static_cast<Class>(key >> 60)) {
      case kLengths:
        f = describe_lengths(p, position);
        break;
      case kFrom:
        f = describe_from(p, position);
        break;
      case kAccepted:
        f = describe_accepted(p, position);
        break;
      case kPool:
        f = describe_slots(p, position);
        break;
      case kTwice:
        f = describe_twice(p, position);
        break;
      case kRead:
        f = describe_read(p, position);
        break;
      case kParents:
        f = describe_parents(p, position);
        break;
      case kLists:
        f = describe_lists(p, position);
        break;
      case kListTwice:
        f = describe_list_twice(p, position);
        break;
      case kListRead:
        f = describe_list_read(p, position);
        break;
      case kParam:
        f = describe_param(p, position);
        break;
      case kValue:
        f = describe_value(p, position);
        break;
      default:
        f = describe_sum(p, position);
    }
  }
  if (threadIdx.x == 0) {
    f.in_step = p.in_step;
    p.record->mark = kMark, p.record->op = p.op;
    p.record->finding = f;
    // The record of the checks before is complete, and says the call's first finding.
    if (p.first != nullptr && key != ~0ull && p.first->key == ~0ull) *p.first = *p.record;
  }
}

}  // namespace deltic::gpu::check
