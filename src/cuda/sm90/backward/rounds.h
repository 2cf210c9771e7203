// A round of a backward call as a call of its own: a range of q/k heads with their value heads.
// Plain views, tested on the host.
#pragma once

#include "core/problem.h"
#include "cuda/schedule/chains.h"

namespace deltic::gpu::gradient {

// A query has no addresses.
inline void shift_data(void*& data, DType type, int64_t elements) {
  if (data != nullptr) data = static_cast<std::byte*>(data) + elements * size_of(type);
}

// Elements [first, first + count) of a flat parameter as one. False: no shape and strides say that,
// as `first` is inside of a row, in the order of its dimensions, and the range goes past its end.
inline bool cut_param(Param& x, int64_t first, int64_t count) {
  if (!x.present || first == 0) return true;
  int64_t at = first;
  if (!x.contiguous) {
    // The last dimension that `first` is not at the beginning of; behind it all indices are those
    // of the range, before it all are those of `first`.
    int64_t row = 1;
    for (int32_t d = x.rank - 1; d >= 0; --d) {
      row *= x.shape[d];
      if (first % row == 0) continue;
      if (first % row + count > row) return false;
      break;
    }
    at = x.at(first);
  }
  shift_data(x.data, x.dtype, at);
  return true;
}

// Value heads of a range of q/k heads.
inline schedule::HeadRange value_heads(const Problem& p, schedule::HeadRange keys) {
  const int64_t group = p.HV / p.H;
  return {keys.first * group, keys.heads * group};
}
// The parameters of value heads alone, and their gradients.
inline bool cut_params(Problem& p, schedule::HeadRange values) {
  const int64_t width = p.gate == Gate::channel ? p.K : 1;
  bool is_cut = true;
  for (Param* x : {&p.A_log, &p.dA_log}) is_cut &= cut_param(*x, values.first, values.heads);
  for (Param* x : {&p.dt_bias, &p.ddt_bias}) {
    is_cut &= cut_param(*x, values.first * width, values.heads * width);
  }
  return is_cut;
}

// Strides and options stay; what comes per head begins with the round's first one.
inline Problem round_of(const Problem& p, int64_t rounds, int64_t index) {
  const schedule::HeadRange keys = schedule::round_at(p.H, rounds, index);
  const schedule::HeadRange values = value_heads(p, keys);
  Problem x = p;
  const auto shift = [](Rows& rows, int64_t head) {
    if (rows.present) shift_data(rows.data, rows.dtype, head * rows.sh);
  };
  for (Rows* rows : {&x.q, &x.k, &x.dq, &x.dk}) shift(*rows, keys.first);
  for (Rows* rows : {&x.v, &x.d_o, &x.beta, &x.g, &x.dv, &x.dbeta, &x.dg}) {
    shift(*rows, values.first);
  }
  for (States* states : {&x.state_in, &x.d_final, &x.d_initial}) {
    if (states->present) shift_data(states->data, states->dtype, values.first * states->s_head);
  }
  cut_params(x, values);
  x.H = keys.heads, x.HV = values.heads;
  return x;
}

// As many, or one where a parameter cannot be cut at every round's first head: it has several
// dimensions, strides that are not a packed one's, and rows that a round begins inside of.
inline int64_t rounds_of_params(const Problem& p, int64_t rounds) {
  if (rounds == 1) return 1;
  Problem x;
  x.gate = p.gate, x.K = p.K;
  for (int64_t i = 1; i < rounds; ++i) {
    x.A_log = p.A_log, x.dt_bias = p.dt_bias, x.dA_log = p.dA_log, x.ddt_bias = p.ddt_bias;
    if (!cut_params(x, value_heads(p, schedule::round_at(p.H, rounds, i)))) return 1;
  }
  return rounds;
}

}  // namespace deltic::gpu::gradient
