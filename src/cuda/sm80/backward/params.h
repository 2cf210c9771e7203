// What the kernels of the general backward get: the call's tensors, and where their scratch lies.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::backward {

// Everything in fp32, [..][width][columns] with the padded sizes of Traits.
struct Scratch {
  float* starts;   // [slot][HV][slices][state]: S, then dS, where segments after the first begin
  float* states;   // [CTA][chunk][state]: S before every chunk of the segment at hand
  float* errors;   // [CTA][chunk][16][columns]: v - S'^T k
  float* scores;   // [CTA][chunk][2][16][16]: L without beta, then the scores
  float *dq, *dk;  // [row][HV][slices][K], of one segment
  float* dg;       // [row][HV][slices][gate width]
  float* dbeta;    // [row][HV][slices]
  double* sums;    // [block][HV][1 + gate width]: of A_log and of dt_bias
};

struct Params {
  Tokens tokens;
  int64_t V;
  uint32_t H, HV, group;  // group: value heads per q/k head
  uint32_t num_slices;    // of value columns
  int32_t K, gate_width;  // gate_width: 0, 1 or K
  int32_t segment;        // tokens
  int64_t slots_per_batch;
  int64_t rows;        // of dq .. dbeta
  bool compact;        // row n * segment + i is token i of the segment of sequence n; else by token
  uint32_t num_items;  // N * HV * num_slices

  Gate gate;
  deltic_gate_form gate_form;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  bool l2norm, wants_sums;
  float scale, lower_bound;

  Rows q, k;     // [B,T,H,K]
  Rows v, d_o;   // [B,T,HV,V]
  Rows beta, g;  // [B,T,HV] or [B,T,HV,V]; [B,T,HV] or [B,T,HV,K]
  Rows gv;       // [B,T,HV,V]
  Rows dq, dk, dv, dbeta, dg, dgv;
  Param A_log, dt_bias, dA_log, ddt_bias;
  States initial, d_final, d_initial;  // by strides, K-first or V-first
  Scratch scratch;
};

// Whose state it is, and which of its value columns.
struct Item {
  uint32_t n, head, slice;
};
__device__ inline Item item_of(const Params& p, uint32_t index) {
  const uint32_t job = index / p.num_slices, n = job / p.HV;
  return {n, job - n * p.HV, index - job * p.num_slices};
}

// The slot of the state before `token` of the T dimension, the first of a segment but the
// sequence's first. Such tokens of different sequences are a segment apart, so no slot is used
// twice, and the lengths may stay on the device.
__device__ inline int64_t start_slot(const Params& p, int64_t batch, int64_t token) {
  return batch * p.slots_per_batch + token / p.segment - 1;
}

// The row of dq .. dbeta that a token has; i: its place in the segment.
__device__ inline int64_t partial_row(const Params& p, int64_t n, const Span& span, int64_t token,
                                      int i) {
  return p.compact ? n * p.segment + i : span.batch * p.tokens.T + token;
}

}  // namespace deltic::gpu::backward
