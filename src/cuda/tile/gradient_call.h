// What every backward gets of a call: tensors, gradients and options.
#pragma once

#include "cuda/tile/grid.h"

namespace deltic::gpu {

// Numbers of a token's gate: none, one, or one per channel.
inline int64_t gate_width_of(const Problem& p) {
  return p.gate == Gate::none ? 0 : p.gate == Gate::head ? 1 : p.K;
}
// Gradients of parameters are sums over tokens.
inline bool wants_sums(const Problem& p) { return p.dA_log || p.ddt_bias; }

// Into a kernel's Params, which has these members beside its own.
template <class Params>
void set_call(const Problem& p, Params& x) {
  x.tokens = tokens_of(p);
  x.H = static_cast<uint32_t>(p.H), x.HV = static_cast<uint32_t>(p.HV);
  x.group = static_cast<uint32_t>(p.HV / p.H);
  x.gate_width = static_cast<int32_t>(gate_width_of(p));
  x.gate = p.gate, x.gate_form = p.gate_form;
  x.beta_kind = p.beta_kind, x.beta_form = p.beta_form;
  x.l2norm = p.l2norm, x.wants_sums = wants_sums(p);
  x.scale = p.scale, x.lower_bound = p.lower_bound;
  x.q = p.q, x.k = p.k, x.v = p.v, x.d_o = p.d_o, x.beta = p.beta, x.g = p.g;
  x.dq = p.dq, x.dk = p.dk, x.dv = p.dv, x.dbeta = p.dbeta, x.dg = p.dg;
  x.A_log = p.A_log, x.dt_bias = p.dt_bias, x.dA_log = p.dA_log, x.ddt_bias = p.ddt_bias;
  x.initial = p.state_in, x.d_final = p.d_final, x.d_initial = p.d_initial;
}

}  // namespace deltic::gpu
