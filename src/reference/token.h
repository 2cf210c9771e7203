// One token of the recurrence: its vectors, and the step from state to state.
#pragma once

#include "reference/forms.h"

namespace deltic::reference {

struct Token {
  Token(const Problem& problem, Scratch& scratch) : p(problem), decayed(scratch, p.K, p.V) {
    for (double** x : {&q, &k, &decay}) *x = scratch.take<double>(p.K);
    for (double** x : {&v, &value_decay, &beta_t, &e, &u}) *x = scratch.take<double>(p.V);
  }

  // Row t of the T dimension, value head h.
  void load(int64_t b, int64_t t, int64_t h) {
    for (int64_t d = 0; d < p.K; ++d) {
      q[d] = get(p.q, b, t, p.k_head(h), d);
      k[d] = get(p.k, b, t, p.k_head(h), d);
    }
    if (p.l2norm) {
      normalize(q, p.K);
      normalize(k, p.K);
    }
    std::fill_n(decay, p.K, 1.0);
    for (int64_t d = 0; d < p.K && p.gate == Gate::channel; ++d) {
      decay[d] = std::exp(log_decay(p, b, t, h, d));
    }
    if (p.gate == Gate::head) std::fill_n(decay, p.K, std::exp(log_decay(p, b, t, h, 0)));
    for (int64_t c = 0; c < p.V; ++c) {
      v[c] = get(p.v, b, t, h, c);
      beta_t[c] = beta(p, b, t, h, c);
      value_decay[c] = p.gv ? std::exp(get(p.gv, b, t, h, c)) : 1;
    }
  }

  // S becomes the state after this token:
  //     S' = decay S value_decay,  e = v - S'^T k,  u = beta e,  S = S' + k u^T
  void step(const Matrix& S) {
    for (int64_t d = 0; d < p.K; ++d) {
      for (int64_t c = 0; c < p.V; ++c) decayed(d, c) = decay[d] * S(d, c) * value_decay[c];
    }
    std::copy_n(v, p.V, e);
    add_transposed_product(decayed, -1, k, e);
    for (int64_t c = 0; c < p.V; ++c) u[c] = beta_t[c] * e[c];
    copy(decayed, S);
    add_outer(S, 1, k, u);
  }

  const Problem& p;
  Matrix decayed;  // S'
  double *q, *k, *decay, *v, *value_decay, *beta_t, *e, *u;
};

// An absent state, and slot -1, are 0.
inline void load_state(const States& x, int64_t slot, int64_t h, const Matrix& S) {
  for (int64_t d = 0; d < S.rows; ++d) {
    for (int64_t c = 0; c < S.columns; ++c) S(d, c) = x && slot >= 0 ? get(x, slot, h, d, c) : 0;
  }
}
inline void store_state(const States& x, int64_t slot, int64_t h, const Matrix& S) {
  for (int64_t d = 0; d < S.rows; ++d) {
    for (int64_t c = 0; c < S.columns; ++c) put(x, slot, h, d, c, S(d, c));
  }
}

}  // namespace deltic::reference
