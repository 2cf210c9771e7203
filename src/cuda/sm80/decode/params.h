// What the decode kernel gets: the tensors and options of a call.
#pragma once

#include "cuda/tile/divisor.h"
#include "cuda/tile/random.cuh"

namespace deltic::gpu::decode {

struct Params {
  Tokens tokens;
  int64_t V;
  uint32_t HV, num_slices, group;  // group: value heads per q/k head
  Divisor by_heads, by_slices, by_group;

  Gate gate;
  deltic_gate_form gate_form;
  BetaKind beta_kind;  // none or head
  deltic_beta_form beta_form;
  bool l2norm;
  float scale, lower_bound;

  Rows q, k;                   // [B,T,H,K], moved by four channels
  Rows v, o;                   // [B,T,HV,V]
  Rows beta, g;                // [B,T,HV]; [B,T,HV], or [B,T,HV,K] moved by four channels
  Param A_log, dt_bias;        // contiguous
  States state_in, state_out;  // [slots,HV,K,V] by strides, moved by 16 bytes
  SlotLists slots;             // at most 2^31 - 1 of them
  Chance chance;               // of Kind::seeded
  uint32_t ahead;              // of kHintsAhead: from a CTA to the one whose state it hints
};

// Of drafted tokens.
struct DraftParams : Params {
  Rows updates;  // [N,T',HV,W], the record, where there is one
  int64_t update_layer, update_tokens;
  int32_t K;
  bool o_whole, u_whole;  // four columns of o, and of a record's u, lie at multiples of their size
};

}  // namespace deltic::gpu::decode
