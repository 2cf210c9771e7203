// What the recurrence's kernel gets: the tensors and options of a forward or decode call.
#pragma once

#include "cuda/tile/random.cuh"

namespace deltic::gpu::recurrence {

struct Params {
  Tokens tokens;
  int64_t V;
  uint32_t HV, num_slices, group;  // group: value heads per q/k head
  int32_t K;

  Gate gate;
  deltic_gate_form gate_form;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  bool l2norm;
  DType rounded_to;  // the state after every token; fp32: it stays as it is
  bool has_seed;     // it is rounded by chance
  float scale, lower_bound;

  Rows q, k;         // [B,T,H,K]
  Rows v, o;         // [B,T,HV,V]
  Rows beta, g, gv;  // [B,T,HV] or [B,T,HV,V]; [B,T,HV] or [B,T,HV,K]; [B,T,HV,V]
  Param A_log, dt_bias;
  States state_in, state_out, ckpt;  // [slots,HV,K,V] by strides
  bool v_first;
  // A thread's neighbours can be moved together: four channels of a column V-first, two columns of
  // a channel K-first.
  bool in_whole, out_whole, ckpt_whole;
  SlotLists slots;
  Indices ckpt_cu, ckpt_tokens, ckpt_slots;
  Chance chance;

  // What tokens do to states (stage_updates.cuh): rows (sequence, token, value head) of k, u and
  // decays, so many per sequence; of commit by layers, and the tokens that count.
  Rows updates;
  int64_t update_layer, update_tokens;
  Indices accepted;
};

}  // namespace deltic::gpu::recurrence
