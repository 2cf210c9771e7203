// One chunk of one sequence and head, as the building blocks and their gradients see it.
#pragma once

#include <omp.h>

#include "reference/forms.h"

namespace deltic::reference {

struct Chunk {
  Sequence s;
  int64_t begin, length;  // in the T dimension

  double at(const Rows& x, int64_t i, int64_t h, int64_t c = 0) const {
    return get(x, s.batch, begin + i, h, c);
  }
  // An absent gradient is 0, and one not asked for goes nowhere.
  double at_or_zero(const Rows& x, int64_t i, int64_t h, int64_t c = 0) const {
    return x ? at(x, i, h, c) : 0;
  }
  void set(const Rows& x, int64_t i, int64_t h, int64_t c, double value) const {
    if (x) put(x, s.batch, begin + i, h, c, value);
  }
};

// Operations on q, k and G; the others have as many heads H as HV.
inline bool has_keys(const Problem& p) {
  return p.op == DELTIC_KKT || p.op == DELTIC_SCORES || p.op == DELTIC_SCORES_INVERSE ||
         p.op == DELTIC_WY;
}

// The rows of q, k, G and beta of a chunk and value head.
struct Operands {
  Operands(const Problem& problem, Scratch& scratch)
      : p(problem),
        q(scratch, has_keys(p) ? p.chunk : 0, p.K),
        k(scratch, has_keys(p) ? p.chunk : 0, p.K),
        G(scratch, has_keys(p) ? p.chunk : 0, p.K),
        decay_ij(scratch.take<double>(p.K)),
        beta_i(scratch.take<double>(p.chunk)) {}

  void load(const Chunk& c, int64_t h) {
    for (int64_t i = 0; i < c.length; ++i) {
      for (int64_t d = 0; d < p.K; ++d) {
        q(i, d) = c.at_or_zero(p.q, i, p.k_head(h), d);
        k(i, d) = c.at(p.k, i, p.k_head(h), d);
        G(i, d) = p.gate == Gate::none ? 0 : c.at(p.g, i, h, p.gate == Gate::channel ? d : 0);
      }
      beta_i[i] = beta(p, c.s.batch, c.begin + i, h, 0);
    }
  }
  // exp(G_i - G_j) for all channels.
  const double* decay(int64_t i, int64_t j) const {
    if (p.gate == Gate::channel) {
      for (int64_t d = 0; d < p.K; ++d) decay_ij[d] = std::exp(G(i, d) - G(j, d));
    } else {
      std::fill_n(decay_ij, p.K, std::exp(G(i, 0) - G(j, 0)));
    }
    return decay_ij;
  }

  const Problem& p;
  Matrix q, k, G;  // [W, K]; one gate per head stands in every channel
  double *decay_ij, *beta_i;
};

// X = (I + A)^-1 of the first `length` rows; A is read below the diagonal. From (I + A) X = I, row
// by row: X_i = e_i - sum_{j<i} A_ij X_j.
inline void invert(const Matrix& A, const Matrix& X, int64_t length) {
  fill(X, 0);
  for (int64_t i = 0; i < length; ++i) {
    X(i, i) = 1;
    for (int64_t j = 0; j < i; ++j) add(-A(i, j), X.row(j), X.row(i), X.columns);
  }
}

// body(memory, chunk, head) for every chunk of every sequence and q/k head; the chunks of a
// sequence and head come in order, on one thread.
template <class Memory, class Body>
void for_each_chunk(const Problem& p, std::byte* workspace, const Body& body) {
  const size_t bytes = Memory(p, nullptr).scratch.used();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads(p, p.N* p.H))
  for (int64_t task = 0; task < p.N * p.H; ++task) {
    Memory memory(p, workspace + static_cast<size_t>(omp_get_thread_num()) * bytes);
    const Sequence s = sequence(p, task / p.H);
    for (int64_t first = 0; first < s.length; first += p.chunk) {
      const Chunk chunk{s, s.begin + first, std::min<int64_t>(p.chunk, s.length - first)};
      body(memory, chunk, task % p.H);
    }
  }
}
template <class Memory>
size_t chunk_bytes(const Problem& p) {
  return bytes_of_threads(p, p.N * p.H, Memory(p, nullptr).scratch.used());
}

}  // namespace deltic::reference
