// The gradients of the building blocks, chunk by chunk, in fp32. With D the gradient of a block's
// output and E_ij = exp(G_i - G_j), per channel where the gate is:
//
//   cumsum   y_i = scale sum_{t<=i} g_t:       dg_t = scale sum_{i>=t} D_i (reverse: i <= t)
//   kkt      y_ij = beta_i k_i E_ij k_j, i > j, and
//   scores   y_ij = scale q_i E_ij k_j, i >= j: with the factor f_i = beta_i or scale and x = k or
//   q
//              dx_i += f_i D_ij E_ij k_j        dk_j += f_i D_ij E_ij x_i
//              dbeta_i += D_ij x_i E_ij k_j     dG_i += f_i D_ij x_i E_ij k_j, and dG_j -= the same
//            In dG the terms with i = j cancel and are left out.
//   inverse  X = (I + A)^-1:                    dA = -X^T D X^T, below the diagonal
//   wy       w = A K', u = A V' with K' = beta k exp(G), V' = beta v; kg = k exp(G_last - G),
//            qg = q exp(G):
//              dA = dw K'^T + du V'^T, lower    dK' = A^T dw, dV' = A^T du
//              dk = beta exp(G) dK' + exp(G_last - G) dkg,  dq = exp(G) dqg,  dv = beta dV'
//              dbeta = k exp(G) dK' + v dV'
//              dG = K' dK' + qg dqg - kg dkg, and the last row takes the sum of the other kg dkg
#pragma once

#include <cmath>

#include "cpu/block_math.h"
#include "cpu/gradients.h"

namespace deltic::block_gradients {

using blocks::Chunk;

// What one thread needs besides the tensors. W is the chunk length.
struct Buffers {
  Buffers(const Problem& p, std::byte* base) {
    Scratch scratch(base);
    const int64_t W = p.chunk, width = gate_width(p);
    const auto take = [&](auto... extents) { return scratch.take<float>(extents...); };
    switch (p.op) {
      case DELTIC_CUMSUM:
      case DELTIC_GATE:
        sum = scratch.take<double>(width);
        row = take(width), up = take(width);
        break;
      case DELTIC_L2NORM:
        row = take(p.K), up = take(p.K);
        break;
      case DELTIC_INVERSE:
        row = take(W), x = take(W, W), a = take(W, W), product = take(W, W);
        break;
      default:  // DELTIC_KKT, DELTIC_SCORES, DELTIC_WY
        row = take(std::max(W, p.K)), up = take(p.K), decay = take(p.K);
        k = take(W, p.K), x = take(W, std::max(p.K, p.V));
        G = take(W, width), dG = take(W, p.K);
        dk = take(W, p.K), dq = take(W, p.K), dbeta = take(W);
        if (p.op == DELTIC_WY) {
          a = take(W, W), da = take(W, W), product = take(W, std::max(p.K, p.V));
        }
    }
    bytes = scratch.used();
  }
  double* sum = nullptr;
  float *row = nullptr, *up = nullptr, *decay = nullptr, *x = nullptr, *a = nullptr, *k = nullptr,
        *G = nullptr, *dG = nullptr, *dk = nullptr, *dq = nullptr, *dbeta = nullptr, *da = nullptr,
        *product = nullptr;
  size_t bytes = 0;
};

// Where a row of values goes if it is asked for.
inline void store_asked(const Rows& out, const Chunk& c, int64_t i, int64_t head, int64_t width,
                        const float* row) {
  if (out) store_row(out, c.batch, c.begin + i, head, 0, width, row);
}

// cumsum and gate: the sum backwards, then the gate's form. sums: A_log, dt_bias of this head.
inline void gate_chunk(const Problem& p, const Chunk& c, Buffers& buffers, double* sums) {
  const int64_t width = gate_width(p);
  const bool is_sum = p.op == DELTIC_CUMSUM;
  const GateRate rate = gate_rate(p, c.head);
  std::fill_n(buffers.sum, width, 0.0);
  for (int64_t n = 0; n < c.length; ++n) {
    const int64_t i = p.reverse ? n : c.length - 1 - n;
    load_row(p.g, c.batch, c.begin + i, c.head, 0, width, buffers.row);
    load_row(p.d_out, c.batch, c.begin + i, c.head, 0, width, buffers.up);
    for (int64_t d = 0; d < width; ++d) {
      const float g = buffers.row[d];
      const float bias = p.dt_bias ? static_cast<float>(p.dt_bias[c.head * width + d]) : 0.0f;
      float dy = buffers.up[d];
      if (is_sum) {
        buffers.sum[d] += static_cast<double>(dy);
        dy = static_cast<float>(p.scale * buffers.sum[d]);
        if (log_decay(p, g, rate, bias) < kMinLogDecay) dy = 0;  // the sum has the bound there
      }
      const GateGradient gradient = log_decay_gradient(p, g, rate, bias, dy);
      buffers.row[d] = gradient.g;
      if (sums != nullptr) {
        sums[0] += static_cast<double>(gradient.A_log);
        sums[1 + d] += static_cast<double>(gradient.g);
      }
    }
    store_asked(p.dg, c, i, c.head, width, buffers.row);
  }
}

inline void l2norm_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  for (int64_t t = c.begin; t < c.begin + c.length; ++t) {
    load_row(p.x, c.batch, t, c.head, 0, p.K, buffers.row);
    load_row(p.d_out, c.batch, t, c.head, 0, p.K, buffers.up);
    const float r = reciprocal_norm(buffers.row, p.K);
    for (int64_t d = 0; d < p.K; ++d) buffers.row[d] *= r;
    normalize_gradient(buffers.row, r, p.K, buffers.up);
    store_asked(p.dx, c, t - c.begin, c.head, p.K, buffers.up);
  }
}

inline void inverse_chunk(const Problem& p, const Chunk& c, Buffers& buffers) {
  const int64_t W = p.chunk, n = c.length;
  float *X = buffers.x, *D = buffers.a, *XtD = buffers.product;
  if (p.out) {
    for (int64_t i = 0; i < n; ++i) {
      load_row(p.out, c.batch, c.begin + i, c.head, 0, i, X + i * W);
      X[i * W + i] = 1;
    }
  } else {
    blocks::invert_rows(p, c, buffers.row, X);
  }
  for (int64_t i = 0; i < n; ++i) {
    load_row(p.d_out, c.batch, c.begin + i, c.head, 0, i, D + i * W);
  }
  // (X^T D)_ij = sum_{l>=i, l>j} X_li D_lj
  for (int64_t i = 0; i < n; ++i) {
    std::fill_n(XtD + i * W, n, 0.0f);
    for (int64_t l = i; l < n; ++l) {
      for (int64_t j = 0; j < l; ++j) XtD[i * W + j] += X[l * W + i] * D[l * W + j];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    std::fill_n(buffers.row, W, 0.0f);
    for (int64_t j = 0; j < i; ++j) {
      for (int64_t m = 0; m <= j; ++m) buffers.row[j] -= XtD[i * W + m] * X[j * W + m];
    }
    store_asked(p.da, c, i, c.head, W, buffers.row);
  }
}

// exp(Gi - Gj) for every channel.
inline void pair_decay(const Problem& p, const float* Gi, const float* Gj, float* decay) {
  if (p.gate == Gate::channel) {
    for (int64_t d = 0; d < p.K; ++d) decay[d] = std::exp(Gi[d] - Gj[d]);
  } else {
    std::fill_n(decay, p.K, std::exp(*Gi - *Gj));
  }
}

// dG is kept for every channel; a gate per head takes the sum of a row.
inline void store_gate_gradient(const Problem& p, const Chunk& c, float* dG) {
  for (int64_t i = 0; i < c.length; ++i) {
    float* row = dG + i * p.K;
    if (p.gate == Gate::head) {
      for (int64_t d = 1; d < p.K; ++d) row[0] += row[d];
    }
    store_asked(p.dg, c, i, c.head, gate_width(p), row);
  }
}

// kkt and scores of one value head; dq and dk of the group are added to.
inline void products_chunk(const Problem& p, const Chunk& c, Buffers& b) {
  const bool is_scores = p.op == DELTIC_SCORES;
  const int64_t K = p.K, width = gate_width(p);
  std::fill_n(b.dG, c.length * K, 0.0f);
  for (int64_t i = 0; i < c.length; ++i) {
    float f = p.scale, dbeta = 0;
    if (!is_scores) load_beta(p, c.batch, c.begin + i, c.head, 0, 1, &f);
    const float* x = (is_scores ? b.x : b.k) + i * K;
    float* dx = (is_scores ? b.dq : b.dk) + i * K;
    const int64_t num_columns = is_scores ? i + 1 : i;
    load_row(p.d_out, c.batch, c.begin + i, c.head, 0, num_columns, b.row);
    for (int64_t j = 0; j < num_columns; ++j) {
      const float *k = b.k + j * K, D = b.row[j];
      float* dk = b.dk + j * K;
      pair_decay(p, b.G + i * width, b.G + j * width, b.decay);
      for (int64_t d = 0; d < K; ++d) {
        const float DE = D * b.decay[d];
        dx[d] += f * DE * k[d];
        dk[d] += f * DE * x[d];
        dbeta += DE * x[d] * k[d];
      }
      for (int64_t d = 0; d < K && i != j; ++d) {
        const float term = f * D * b.decay[d] * x[d] * k[d];
        b.dG[i * K + d] += term;
        b.dG[j * K + d] -= term;
      }
    }
    store_asked(p.dbeta, c, i, c.head, 1, &dbeta);
  }
  store_gate_gradient(p, c, b.dG);
}

// One of wy's two products, y = A x with x = beta z: da takes dy x^T, and product becomes A^T dy.
inline void pull_through_a(const Problem& p, const Chunk& c, Buffers& b, const Rows& dy,
                           int64_t width) {
  std::fill_n(b.product, c.length * width, 0.0f);
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t first = 0; first < width; first += p.K) {  // room for K numbers at a time
      const int64_t count = std::min(p.K, width - first);
      load_row(dy, c.batch, c.begin + i, c.head, first, count, b.up);
      for (int64_t j = 0; j <= i; ++j) {
        const float *x = b.x + j * width + first, a = b.a[i * p.chunk + j];
        float* pulled = b.product + j * width + first;
        float dot = 0;
        for (int64_t d = 0; d < count; ++d) {
          dot += b.up[d] * x[d];
          pulled[d] += a * b.up[d];
        }
        b.da[i * p.chunk + j] += dot;
      }
    }
  }
}

// wy of one value head; dq and dk of the group are added to.
inline void wy_chunk(const Problem& p, const Chunk& c, Buffers& b) {
  const int64_t K = p.K, V = p.V, W = p.chunk, width = gate_width(p), n = c.length, last = n - 1;
  const auto G = [&](int64_t i, int64_t d) { return b.G[i * width + (width == 1 ? 0 : d)]; };
  const auto beta_of = [&](int64_t i) {
    float beta = 1;
    load_beta(p, c.batch, c.begin + i, c.head, 0, 1, &beta);
    return beta;
  };
  std::fill_n(b.dG, n * K, 0.0f);
  std::fill_n(b.dbeta, n, 0.0f);
  std::fill_n(b.da, n * W, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    load_row(p.a, c.batch, c.begin + i, c.head, 0, i + 1, b.a + i * W);
  }
  if (p.d_w) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t d = 0; d < K; ++d) {
        b.x[i * K + d] = beta_of(i) * b.k[i * K + d] * std::exp(G(i, d));
      }
    }
    pull_through_a(p, c, b, p.d_w, K);
    for (int64_t i = 0; i < n; ++i) {
      const float beta = beta_of(i);
      for (int64_t d = 0; d < K; ++d) {
        const float decayed = std::exp(G(i, d)) * b.product[i * K + d],
                    term = b.k[i * K + d] * decayed;
        b.dk[i * K + d] += beta * decayed;
        b.dbeta[i] += term;
        b.dG[i * K + d] += beta * term;
      }
    }
  }
  if (p.d_u) {
    for (int64_t i = 0; i < n; ++i) {
      load_row(p.v, c.batch, c.begin + i, c.head, 0, V, b.x + i * V);
      for (int64_t d = 0; d < V; ++d) b.x[i * V + d] *= beta_of(i);
    }
    pull_through_a(p, c, b, p.d_u, V);
    for (int64_t i = 0; i < n; ++i) {
      const float beta = beta_of(i);
      load_row(p.v, c.batch, c.begin + i, c.head, 0, V, b.x);
      for (int64_t d = 0; d < V; ++d) {
        b.dbeta[i] += b.x[d] * b.product[i * V + d];
        b.product[i * V + d] *= beta;
      }
      store_asked(p.dv, c, i, c.head, V, b.product + i * V);
    }
  }
  for (int64_t i = 0; i < n && p.d_kg; ++i) {
    load_row(p.d_kg, c.batch, c.begin + i, c.head, 0, K, b.up);
    for (int64_t d = 0; d < K; ++d) {
      const float decayed = std::exp(G(last, d) - G(i, d)) * b.up[d];
      b.dk[i * K + d] += decayed;
      if (i == last) continue;
      b.dG[i * K + d] -= b.k[i * K + d] * decayed;
      b.dG[last * K + d] += b.k[i * K + d] * decayed;
    }
  }
  for (int64_t i = 0; i < n && p.d_qg; ++i) {
    load_row(p.q, c.batch, c.begin + i, p.k_head(c.head), 0, K, b.row);
    load_row(p.d_qg, c.batch, c.begin + i, c.head, 0, K, b.up);
    for (int64_t d = 0; d < K; ++d) {
      const float decayed = std::exp(G(i, d)) * b.up[d];
      b.dq[i * K + d] += decayed;
      b.dG[i * K + d] += b.row[d] * decayed;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    store_asked(p.da, c, i, c.head, W, b.da + i * W);
    store_asked(p.dbeta, c, i, c.head, 1, b.dbeta + i);
    if (!p.d_u && p.dv) zero_row(p.dv, c.batch, c.begin + i, c.head, 0, V);
  }
  store_gate_gradient(p, c, b.dG);
}

// The value heads of one q/k head, in order; c.head is the q/k head.
inline void group_chunk(const Problem& p, Chunk c, Buffers& b) {
  const int64_t K = p.K, k_head = c.head, group = p.HV / p.H;
  std::fill_n(b.dq, c.length * K, 0.0f);
  std::fill_n(b.dk, c.length * K, 0.0f);
  for (int64_t i = 0; i < c.length && p.op == DELTIC_SCORES; ++i) {
    load_row(p.q, c.batch, c.begin + i, k_head, 0, K, b.x + i * K);
  }
  for (c.head = k_head * group; c.head < (k_head + 1) * group; ++c.head) {
    blocks::load_keys_and_gates(p, c, b);
    p.op == DELTIC_WY ? wy_chunk(p, c, b) : products_chunk(p, c, b);
  }
  for (int64_t i = 0; i < c.length; ++i) {
    store_asked(p.dq, c, i, k_head, K, b.dq + i * K);
    store_asked(p.dk, c, i, k_head, K, b.dk + i * K);
  }
}

inline void run_chunk(const Problem& p, const Chunk& c, Buffers& buffers, double* sums) {
  switch (p.op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return gate_chunk(p, c, buffers, sums);
    case DELTIC_L2NORM:
      return l2norm_chunk(p, c, buffers);
    case DELTIC_INVERSE:
      return inverse_chunk(p, c, buffers);
    default:
      return group_chunk(p, c, buffers);
  }
}

inline size_t workspace_bytes(const Problem& p) {
  Scratch sums(nullptr);
  sums.take<double>(num_parameter_sums(p));
  return static_cast<size_t>(
      checked_sum(sums.used(), checked_product(Buffers(p, nullptr).bytes, blocks::num_threads(p))));
}

// Every thread walks the same list and takes each size-th chunk and head; where sums over
// tokens are wanted, all chunks of a sequence and head, in order.
inline void run(const Problem& p, std::span<std::byte> workspace) {
  const size_t bytes = Buffers(p, nullptr).bytes;
  const int64_t per_head = parameter_sums_per_head(p);
  Scratch scratch(workspace.data());
  double* sums = scratch.take<double>(num_parameter_sums(p));
  std::fill_n(sums, num_parameter_sums(p), 0.0);
  cpu::run_team(blocks::num_threads(p), [&](const cpu::Member& member) {
    Buffers buffers(p,
                    workspace.data() + scratch.used() + static_cast<size_t>(member.index) * bytes);
    int64_t turn = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const Sequence s = sequence(p, n);
      for (int64_t h = 0; h < p.H; ++h) {
        double* mine = per_head > 0 ? sums + (n * p.H + h) * per_head : nullptr;
        for (int64_t first = 0; first < s.length; first += p.chunk) {
          if (first == 0 || mine == nullptr) ++turn;
          if (turn % member.size != member.index) continue;
          const int64_t length = std::min<int64_t>(p.chunk, s.length - first);
          run_chunk(p, Chunk{s.batch, s.begin + first, length, h}, buffers, mine);
        }
      }
    }
  });
  store_parameter_gradients(p, sums);
  zero_gradient_padding(p);
}

}  // namespace deltic::block_gradients
