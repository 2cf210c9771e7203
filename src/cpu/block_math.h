// The building blocks, chunk by chunk, in fp32: straight loops over the definitions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/problem.h"
#include "cpu/recurrence.h"
#include "cpu/schedule.h"

namespace deltic::blocks {

// One chunk of one sequence, one head.
struct Chunk {
  int64_t batch, begin, length, head;
};

inline int64_t num_heads(const Problem& p) { return p.op == DELTIC_L2NORM ? p.H : p.HV; }

// What one thread needs besides the tensors. W is the chunk length.
struct Buffers {
  Buffers(const Problem& p, std::byte* base) {
    Scratch scratch(base);
    const int64_t W = p.chunk, width = gate_width(p);
    switch (p.op) {
      case DELTIC_CUMSUM:
        sum = scratch.take<double>(width);
        [[fallthrough]];
      case DELTIC_GATE:
        row = scratch.take<float>(width);
        break;
      case DELTIC_L2NORM:
        row = scratch.take<float>(p.K);
        break;
      case DELTIC_INVERSE:
        row = scratch.take<float>(W);
        x = scratch.take<float>(W, W);
        break;
      case DELTIC_SCORES_INVERSE:
        a = scratch.take<float>(W);
        x = scratch.take<float>(W, W);
        [[fallthrough]];
      case DELTIC_KKT:
      case DELTIC_SCORES:
        row = scratch.take<float>(std::max(W, p.K));
        k = scratch.take<float>(W, p.K);
        G = scratch.take<float>(W, width);
        break;
      default:  // DELTIC_WY
        row = scratch.take<float>(std::max(p.K, p.V));
        a = scratch.take<float>(W, W);
        x = scratch.take<float>(W, std::max(p.K, p.V));
        k = scratch.take<float>(W, p.K);
        G = scratch.take<float>(W, width);
    }
    bytes = scratch.used();
  }
  double* sum = nullptr;
  float *row = nullptr, *x = nullptr, *a = nullptr, *k = nullptr, *G = nullptr;
  size_t bytes = 0;
};

// out_i = scale * sum of the chunk's log decays up to row i (reverse: from row i on). The sum is in
// double: 64 terms of -104 would cost fp32 3e-4.
inline void cumsum_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  const int64_t width = gate_width(p);
  std::fill_n(buffers.sum, width, 0.0);
  for (int64_t i = 0; i < c.length; ++i) {
    const int64_t t = c.begin + (p.reverse ? c.length - 1 - i : i);
    load_log_decay(p, c.batch, t, c.head, buffers.row);
    for (int64_t d = 0; d < width; ++d) {
      buffers.sum[d] += std::max(buffers.row[d], kMinLogDecay);
      buffers.row[d] = static_cast<float>(p.scale * buffers.sum[d]);
    }
    store_row(p.out, c.batch, t, c.head, 0, width, buffers.row);
  }
}

inline void gate_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  for (int64_t t = c.begin; t < c.begin + c.length; ++t) {
    load_log_decay(p, c.batch, t, c.head, buffers.row);
    store_row(p.out, c.batch, t, c.head, 0, gate_width(p), buffers.row);
  }
}

inline void l2norm_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  for (int64_t t = c.begin; t < c.begin + c.length; ++t) {
    load_row(p.x, c.batch, t, c.head, 0, p.K, buffers.row);
    const float r = reciprocal_norm(buffers.row, p.K);
    for (int64_t d = 0; d < p.K; ++d) buffers.row[d] *= r;
    store_row(p.out, c.batch, t, c.head, 0, p.K, buffers.row);
    if (p.rstd) store_row(p.rstd, c.batch, t, c.head, 0, 1, &r);
  }
}

// k and G of a chunk, into the members of these names.
template <class Memory>
void load_keys_and_gates(const Problem& p, const Chunk& c, Memory& buffers) {
  const int64_t width = gate_width(p);
  if (p.gate == Gate::none) std::fill_n(buffers.G, c.length, 0.0f);
  for (int64_t i = 0; i < c.length; ++i) {
    const int64_t t = c.begin + i;
    load_row(p.k, c.batch, t, p.k_head(c.head), 0, p.K, buffers.k + i * p.K);
    if (p.gate != Gate::none) load_row(p.g, c.batch, t, c.head, 0, width, buffers.G + i * width);
  }
}

// sum_d x_d k_d exp(Gi_d - Gj_d)
inline float gated_product(const Problem& p, const float* x, const float* k, const float* Gi,
                           const float* Gj) {
  float sum = 0;
  if (p.gate == Gate::channel) {
    for (int64_t d = 0; d < p.K; ++d) sum += x[d] * k[d] * std::exp(Gi[d] - Gj[d]);
    return sum;
  }
  for (int64_t d = 0; d < p.K; ++d) sum += x[d] * k[d];
  return sum * std::exp(*Gi - *Gj);
}

// Row i of beta_i (k_i, k_j), j < i, or of scale (q_i, k_j), j <= i, with decays: f(j, entry).
// Needs load_keys_and_gates.
template <class F>
void products_row(const Problem& p, const Chunk& c, int64_t i, bool is_scores, Buffers& buffers,
                  const F& f) {
  const int64_t K = p.K, width = gate_width(p), t = c.begin + i;
  float factor = p.scale;
  if (is_scores) {
    load_row(p.q, c.batch, t, p.k_head(c.head), 0, K, buffers.row);
  } else {
    load_beta(p, c.batch, t, c.head, 0, 1, &factor);
    std::copy_n(buffers.k + i * K, K, buffers.row);
  }
  for (int64_t j = 0; j < (is_scores ? i + 1 : i); ++j) {
    f(j, factor * gated_product(p, buffers.row, buffers.k + j * K, buffers.G + i * width,
                                buffers.G + j * width));
  }
}

// Row i of a result of kkt (strictly lower) or of scores.
inline void store_products(const Problem& p, const Chunk& c, int64_t i, bool is_scores,
                           Buffers& buffers) {
  const int64_t t = c.begin + i, num_columns = is_scores ? i + 1 : i;
  products_row(p, c, i, is_scores, buffers, [&](int64_t j, float x) {
    store(p.out.data, p.out.dtype, p.out.at(c.batch, t, c.head) + j, x);
  });
  zero_row(p.out, c.batch, t, c.head, num_columns, p.chunk - num_columns);
}

inline void products_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  load_keys_and_gates(p, c, buffers);
  for (int64_t i = 0; i < c.length; ++i) {
    store_products(p, c, i, p.op == DELTIC_SCORES, buffers);
  }
}

// Row i of X = (I + A)^-1 from row i of A: X_i = e_i - sum_{j<i} A_ij X_j.
inline void invert_row(int64_t W, int64_t i, const float* A, float* X) {
  std::fill_n(X + i * W, W, 0.0f);
  X[i * W + i] = 1;
  for (int64_t j = 0; j < i; ++j) {
    for (int64_t m = 0; m <= j; ++m) X[i * W + m] -= A[j] * X[j * W + m];
  }
}

// A: room for a row.
inline void invert_rows(const Problem& p, const Chunk& c, float* A, float* X) {
  for (int64_t i = 0; i < c.length; ++i) {
    load_row(p.a, c.batch, c.begin + i, c.head, 0, i, A);
    invert_row(p.chunk, i, A, X);
  }
}

inline void inverse_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  invert_rows(p, c, buffers.row, buffers.x);
  for (int64_t i = 0; i < c.length; ++i) {
    store_row(p.out, c.batch, c.begin + i, c.head, 0, p.chunk, buffers.x + i * p.chunk);
  }
}

inline void scores_inverse_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  load_keys_and_gates(p, c, buffers);
  for (int64_t i = 0; i < c.length; ++i) {
    store_products(p, c, i, true, buffers);
    products_row(p, c, i, false, buffers, [&](int64_t j, float x) { buffers.a[j] = x; });
    invert_row(p.chunk, i, buffers.a, buffers.x);
    store_row(p.inverse, c.batch, c.begin + i, c.head, 0, p.chunk, buffers.x + i * p.chunk);
  }
}

// out_i = sum_{j<=i} a_ij x_j
inline void multiply_by_a(const Problem& p, const Chunk& c, Buffers& buffers, int64_t width,
                          const Rows& out) {
  for (int64_t i = 0; i < c.length; ++i) {
    std::fill_n(buffers.row, width, 0.0f);
    for (int64_t j = 0; j <= i; ++j) {
      const float a = buffers.a[i * p.chunk + j];
      for (int64_t d = 0; d < width; ++d) buffers.row[d] += a * buffers.x[j * width + d];
    }
    store_row(out, c.batch, c.begin + i, c.head, 0, width, buffers.row);
  }
}

inline void wy_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  const int64_t K = p.K, V = p.V, W = p.chunk, width = gate_width(p), last = c.length - 1;
  load_keys_and_gates(p, c, buffers);
  const auto G = [&](int64_t i, int64_t d) { return buffers.G[i * width + (width == 1 ? 0 : d)]; };

  for (int64_t i = 0; i < c.length; ++i) {
    load_row(p.a, c.batch, c.begin + i, c.head, 0, i + 1, buffers.a + i * W);
    float beta = 1;
    load_beta(p, c.batch, c.begin + i, c.head, 0, 1, &beta);
    for (int64_t d = 0; d < K; ++d) {
      buffers.x[i * K + d] = beta * buffers.k[i * K + d] * std::exp(G(i, d));
    }
  }
  multiply_by_a(p, c, buffers, K, p.w);

  if (p.u) {
    for (int64_t i = 0; i < c.length; ++i) {
      float beta = 1;
      load_beta(p, c.batch, c.begin + i, c.head, 0, 1, &beta);
      load_row(p.v, c.batch, c.begin + i, c.head, 0, V, buffers.x + i * V);
      for (int64_t d = 0; d < V; ++d) buffers.x[i * V + d] *= beta;
    }
    multiply_by_a(p, c, buffers, V, p.u);
  }
  for (int64_t i = 0; i < c.length && p.kg; ++i) {
    for (int64_t d = 0; d < K; ++d) {
      buffers.row[d] = buffers.k[i * K + d] * std::exp(G(last, d) - G(i, d));
    }
    store_row(p.kg, c.batch, c.begin + i, c.head, 0, K, buffers.row);
  }
  for (int64_t i = 0; i < c.length && p.qg; ++i) {
    load_row(p.q, c.batch, c.begin + i, p.k_head(c.head), 0, K, buffers.row);
    for (int64_t d = 0; d < K; ++d) buffers.row[d] *= std::exp(G(i, d));
    store_row(p.qg, c.batch, c.begin + i, c.head, 0, K, buffers.row);
  }
}

inline void run_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  switch (p.op) {
    case DELTIC_CUMSUM:
      return cumsum_chunk(p, c, buffers);
    case DELTIC_GATE:
      return gate_chunk(p, c, buffers);
    case DELTIC_L2NORM:
      return l2norm_chunk(p, c, buffers);
    case DELTIC_INVERSE:
      return inverse_chunk(p, c, buffers);
    case DELTIC_SCORES_INVERSE:
      return scores_inverse_chunk(p, c, buffers);
    case DELTIC_WY:
      return wy_chunk(p, c, buffers);
    default:
      return products_chunk(p, c, buffers);
  }
}

inline void zero_all_padding(const Problem& p) {
  const int64_t heads = num_heads(p);
  const bool is_gate = p.op == DELTIC_CUMSUM || p.op == DELTIC_GATE;
  zero_padding(p, p.out, heads, is_gate ? gate_width(p) : p.op == DELTIC_L2NORM ? p.K : p.chunk);
  zero_padding(p, p.inverse, heads, p.chunk);
  zero_padding(p, p.rstd, heads, 1);
  zero_padding(p, p.w, heads, p.K);
  zero_padding(p, p.u, heads, p.V);
  zero_padding(p, p.kg, heads, p.K);
  zero_padding(p, p.qg, heads, p.K);
}

// Plain code takes about 20 times as long as SIMD.
inline int num_threads(const Problem& p) { return cpu::block_threads(p, num_heads(p), 20); }

inline size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(checked_product(Buffers(p, nullptr).bytes, num_threads(p)));
}

// Every thread walks the same list of chunks and heads and takes each size-th: no table of
// chunks is needed, and counting is nothing next to the work of a chunk.
inline void run(const Problem& p, std::span<std::byte> workspace) {
  const size_t bytes = Buffers(p, nullptr).bytes;
  cpu::run_team(num_threads(p), [&](const cpu::Member& member) {
    Buffers buffers(p, workspace.data() + static_cast<size_t>(member.index) * bytes);
    int64_t turn = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const Sequence s = sequence(p, n);
      for (int64_t first = 0; first < s.length; first += p.chunk) {
        const int64_t length = std::min<int64_t>(p.chunk, s.length - first);
        for (int64_t h = 0; h < num_heads(p); ++h) {
          if (turn++ % member.size != member.index) continue;
          run_chunk(p, Chunk{s.batch, s.begin + first, length, h}, buffers);
        }
      }
    }
  });
  zero_all_padding(p);
}

}  // namespace deltic::blocks
