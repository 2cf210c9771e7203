// What a check of values found: plain data, because on a GPU it is found far from who can say it,
// and one place that words it.
#pragma once

#include <cstdint>
#include <string>

#include "deltic/deltic.h"

namespace deltic {

enum class Wrong : int32_t {
  nothing,
  first_offset,        // got
  falling_offset,      // got, other: the one before; at; limit: M of checkpoint lists, else -1
  last_offset,         // got, limit
  few_columns,         // limit: tokens, sequence, got
  slot,                // limit, got, at
  written_twice,       // got: the slot; sequence, other: who writes it
  read_while_written,  // got: the slot; sequence; other: who writes it
  token_of_sequence,   // limit: tokens, sequence, got, at
  not_finite,          // value; where
  growing_gate,        // value; where
  accepted,            // limit, got, sequence
  long_window,         // limit: tokens that a window has room for, got, sequence
  many_drafts,         // got: tokens, sequence
  parent,              // got: the parent, token, sequence
  parent_not_kept,     // got: the parent, token, sequence
  start_overwritten    // got: the slot, other: the token that writes it; token, sequence
};

enum class Argument : int32_t {
  q,
  k,
  v,
  x,
  a,
  beta,
  g,
  gv,
  d_o,
  out,
  d_out,
  d_w,
  d_u,
  d_kg,
  d_qg,
  z,  // rows
  A_log,
  dt_bias,
  weight,
  bias,
  initial_state,
  state_pool,
  d_final_state,
  cu_seqlens,
  cu_seqlens_host,
  read_index,
  write_index,
  ckpt_cu,
  ckpt_tokens,
  ckpt_slots,
  accepted,
  parents,
  recurrent_from,
  record
};

struct Finding {
  Wrong wrong = Wrong::nothing;
  Argument argument = Argument::q;
  int64_t sequence = -1, token = -1, head = -1, channel = -1;  // where; -1: not of such a one
  int64_t layer = -1;
  bool in_step = false;  // of the operation as a part of a step
  int64_t got = 0, other = 0, limit = 0, at = 0;
  double value = 0;
};

// `op: argument: expected X, got Y`.
std::string text_of(deltic_op op, const Finding& f);

}  // namespace deltic
