// What needs the owners of slots, by a thread, and numbers that are not finite, by a warp.
#pragma once

#include "cuda/sm80/check/findings.cuh"

namespace deltic::gpu::check {

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
  return last_begun(p.tokens.N, [&](int64_t n) { return first_line(p, n) <= line; });
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

}  // namespace deltic::gpu::check
