// The oracle: the recurrence of the family in fp64, token by token, and the entries of all
// operations.
#include "reference/reference.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "core/block_gradients.h"
#include "core/block_math.h"
#include "core/conv_math.h"
#include "core/recurrence.h"
#include "core/recurrence_backward.h"

namespace deltic::reference {
namespace {

// What one thread needs: the state S, K x V, and the vectors of one token.
struct Token {
  Token(const Problem& p, std::byte* base) {
    Scratch scratch(base);
    S = scratch.take<double>(p.K * p.V);
    q = scratch.take<double>(p.K);
    k = scratch.take<double>(p.K);
    decay = scratch.take<double>(p.K);
    v = scratch.take<double>(p.V);
    value_decay = scratch.take<double>(p.V);
    beta = scratch.take<double>(p.V);
    u = scratch.take<double>(p.V);
    o = scratch.take<double>(p.V);
    bytes = scratch.used();
  }

  void load(const Problem& p, int64_t b, int64_t t, int64_t h) {
    load_row(p.q, b, t, p.k_head(h), 0, p.K, q);
    load_row(p.k, b, t, p.k_head(h), 0, p.K, k);
    load_row(p.v, b, t, h, 0, p.V, v);
    load_beta(p, b, t, h, 0, p.V, beta);
    if (p.l2norm) {
      normalize(q, p.K);
      normalize(k, p.K);
    }
    std::fill_n(decay, p.K, 1.0);
    if (p.gate != Gate::none) load_log_decay(p, b, t, h, decay);
    if (p.gate == Gate::head) std::fill_n(decay, p.K, decay[0]);
    if (p.gate != Gate::none) {
      for (int64_t d = 0; d < p.K; ++d) decay[d] = std::exp(decay[d]);
    }
    std::fill_n(value_decay, p.V, 1.0);
    if (p.gv) {
      load_row(p.gv, b, t, h, 0, p.V, value_decay);
      for (int64_t c = 0; c < p.V; ++c) value_decay[c] = std::exp(value_decay[c]);
    }
  }

  double *S, *q, *k, *decay, *v, *value_decay, *beta, *u, *o;
  size_t bytes;
};

// S_{t-1} -> S_t and o_t; d counts the keys, c the value columns. Row d of S is used as soon as it
// is there: two sweeps over S instead of four take two thirds of the time.
void step(const Problem& p, Token& x) {
  const int64_t K = p.K, V = p.V;
  // S' = decay_t * S_{t-1} * exp(gv_t);  u_t = beta_t * (v_t - S'^T k_t)
  std::copy_n(x.v, V, x.u);
  for (int64_t d = 0; d < K; ++d) {
    double* S = x.S + d * V;
    const double k = x.k[d], decay = x.decay[d];
#pragma omp simd
    for (int64_t c = 0; c < V; ++c) {
      S[c] *= decay * x.value_decay[c];
      x.u[c] -= S[c] * k;
    }
  }
  for (int64_t c = 0; c < V; ++c) x.u[c] *= x.beta[c];
  // S_t = S' + k_t u_t^T;  o_t = scale * S_t^T q_t
  std::fill_n(x.o, V, 0.0);
  for (int64_t d = 0; d < K; ++d) {
    double* S = x.S + d * V;
    const double k = x.k[d], q = x.q[d];
#pragma omp simd
    for (int64_t c = 0; c < V; ++c) {
      S[c] += k * x.u[c];
      x.o[c] += S[c] * q;
    }
  }
  for (int64_t c = 0; c < V; ++c) x.o[c] *= p.scale;
}

void run_sequence(const Problem& p, const Sequence& s, int64_t h, Token& x) {
  if (s.skipped) {
    for (int64_t t = 0; t < s.length; ++t) zero_row(p.o, s.batch, s.begin + t, h, 0, p.V);
    return;
  }
  StateColumns<double> states(p, s, h, 0, p.V, p.V);
  states.load_initial(x.S);
  states.keep(x.S, 0);
  for (int64_t t = 0; t < s.length; ++t) {
    x.load(p, s.batch, s.begin + t, h);
    step(p, x);
    store_row(p.o, s.batch, s.begin + t, h, 0, p.V, x.o);
    states.keep(x.S, t + 1);
  }
}

void run_recurrence(const Problem& p, std::span<std::byte> workspace) {
  const size_t bytes = Token(p, nullptr).bytes;
  const int64_t num_tasks = p.N * p.HV;
#pragma omp parallel for schedule(dynamic) num_threads(useful_threads(p, num_tasks))
  for (int64_t i = 0; i < num_tasks; ++i) {
    Token x(p, workspace.data() + static_cast<size_t>(omp_get_thread_num()) * bytes);
    run_sequence(p, sequence(p, i / p.HV), i % p.HV, x);
  }
  zero_padding(p, p.o, p.HV, p.V);
}

bool is_recurrence(const Problem& p) { return p.op == DELTIC_FORWARD || p.op == DELTIC_DECODE; }

const char* nothing_missing() { return nullptr; }
const char* refuse_call(const Problem& p) {
  return p.save != DELTIC_SAVE_NONE ? "keeps nothing for backward" : nullptr;
}

size_t workspace_bytes(const Problem& p) {
  if (p.op == DELTIC_CONV) return 0;
  if (p.op == DELTIC_BACKWARD) return recurrence_backward::workspace_bytes<double>(p);
  if (p.is_gradient) return block_gradients::workspace_bytes<double>(p);
  if (!is_recurrence(p)) return blocks::workspace_bytes<double>(p);
  return Token(p, nullptr).bytes * static_cast<size_t>(p.threads);
}

void run(const Problem& p, std::span<std::byte> workspace, void*) {
  if (p.op == DELTIC_CONV) return conv::run<double>(p);
  if (p.op == DELTIC_BACKWARD) return recurrence_backward::run<double>(p, workspace);
  if (p.is_gradient) return block_gradients::run<double>(p, workspace);
  is_recurrence(p) ? run_recurrence(p, workspace) : blocks::run<double>(p, workspace);
}

}  // namespace

// One entry serves every operation: the problem says which it is.
const Implementation& implementation(deltic_op) {
  static const Implementation oracle{
      "reference", nothing_missing, refuse_call, workspace_bytes, run, true};
  return oracle;
}

}  // namespace deltic::reference
