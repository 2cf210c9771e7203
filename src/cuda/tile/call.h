// A call's fields into the parameters of a kernel, which has members of these names beside its own.
#pragma once

#include "cuda/tile/grid.h"
#include "cuda/tile/slots.cuh"

namespace deltic::gpu {

// Of forward, decode and backward: lengths, inputs, options.
template <class Params>
void set_call(const Problem& p, Params& x) {
  x.tokens = tokens_of(p);
  x.HV = static_cast<uint32_t>(p.HV), x.group = static_cast<uint32_t>(p.HV / p.H);
  x.gate = p.gate, x.gate_form = p.gate_form;
  x.beta_kind = p.beta_kind, x.beta_form = p.beta_form;
  x.l2norm = p.l2norm;
  x.scale = p.scale, x.lower_bound = p.lower_bound;
  x.q = p.q, x.k = p.k, x.v = p.v, x.beta = p.beta, x.g = p.g;
  x.A_log = p.A_log, x.dt_bias = p.dt_bias;
}
// Of forward and decode: o and states.
template <class Params>
void set_results(const Problem& p, Params& x) {
  x.V = p.V;
  x.slots = slot_lists_of(p);
  x.o = p.o, x.state_in = p.state_in, x.state_out = p.state_out;
}

// Numbers of a token's gate: none, one, or one per channel.
inline int64_t gate_width_of(const Problem& p) {
  return p.gate == Gate::none ? 0 : p.gate == Gate::head ? 1 : p.K;
}
// Gradients of parameters are sums over tokens.
inline bool wants_sums(const Problem& p) { return p.dA_log || p.ddt_bias; }
// Of backward.
template <class Params>
void set_gradients(const Problem& p, Params& x) {
  x.H = static_cast<uint32_t>(p.H);
  x.gate_width = static_cast<int32_t>(gate_width_of(p));
  x.wants_sums = wants_sums(p);
  x.d_o = p.d_o;
  x.dq = p.dq, x.dk = p.dk, x.dv = p.dv, x.dbeta = p.dbeta, x.dg = p.dg;
  x.dA_log = p.dA_log, x.ddt_bias = p.ddt_bias;
  x.initial = p.state_in, x.d_final = p.d_final, x.d_initial = p.d_initial;
}

}  // namespace deltic::gpu
