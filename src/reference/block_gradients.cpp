// The gradients of the building blocks, chunk by chunk. D is the gradient of a block's output.
#include "reference/chunk.h"
#include "reference/operations.h"

namespace deltic::reference {
namespace {

// W x W and W x K matrices, of a chunk and value head; dq and dk of the group of value heads.
struct Memory {
  Memory(const Problem& p, std::byte* base)
      : scratch(base),
        rows(p, scratch),
        A(scratch, p.chunk, p.chunk),
        D(scratch, p.chunk, p.chunk),
        X(scratch, p.chunk, p.chunk),
        XtD(scratch, p.chunk, p.chunk),
        dq(scratch, has_keys(p) ? p.chunk : 0, p.K),
        dk(scratch, has_keys(p) ? p.chunk : 0, p.K),
        dG(scratch, has_keys(p) ? p.chunk : 0, p.K),
        beta_k(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.K),
        d_w(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.K),
        v(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.V),
        d_u(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.V),
        x(scratch.take<double>(p.K)),
        dx(scratch.take<double>(p.K)),
        dv(scratch.take<double>(p.V)),
        dbeta(scratch.take<double>(p.chunk)) {}
  Scratch scratch;
  Operands rows;
  Matrix A, D, X, XtD, dq, dk, dG, beta_k, d_w, v, d_u;
  double *x, *dx, *dv, *dbeta;
};

// out_i = scale sum_{t<=i} max(y_t, -104): dy_t = scale sum_{i>=t} D_i, and 0 where the maximum is
// the bound. Reverse: i <= t.
void cumsum(const Problem& p, const Chunk& c, int64_t h, ParameterSums& sums) {
  for (int64_t d = 0; d < gate_width(p); ++d) {
    double sum = 0;
    for (int64_t n = 0; n < c.length; ++n) {
      const int64_t i = p.reverse ? n : c.length - 1 - n, t = c.begin + i;
      sum += c.at(p.d_out, i, h, d);
      const bool is_bound = log_decay(p, c.s.batch, t, h, d) < kMinLogDecay;
      put_gate_gradient(p, c.s, t, h, d, is_bound ? 0 : p.scale * sum, sums);
    }
  }
}

void gate(const Problem& p, const Chunk& c, int64_t h, ParameterSums& sums) {
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < gate_width(p); ++d) {
      put_gate_gradient(p, c.s, c.begin + i, h, d, c.at(p.d_out, i, h, d), sums);
    }
  }
}

void l2norm(const Problem& p, const Chunk& c, int64_t h, Memory& m) {
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < p.K; ++d) {
      m.x[d] = c.at(p.x, i, h, d);
      m.dx[d] = c.at(p.d_out, i, h, d);
    }
    normalize_gradient(m.x, m.dx, p.K);
    for (int64_t d = 0; d < p.K; ++d) c.set(p.dx, i, h, d, m.dx[d]);
  }
}

// X = (I + A)^-1: dX = -X dA X, hence dA = -X^T D X^T, below the diagonal. D counts there too: the
// rest of X is constant.
void inverse(const Problem& p, const Chunk& c, int64_t h, Memory& m) {
  fill(m.A, 0);
  fill(m.D, 0);
  fill(m.X, 0);
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      m.D(i, j) = c.at(p.d_out, i, h, j);
      (p.out ? m.X : m.A)(i, j) = c.at(p.out ? p.out : p.a, i, h, j);
    }
    m.X(i, i) = 1;
  }
  if (!p.out) invert(m.A, m.X, c.length);
  fill(m.XtD, 0);
  for (int64_t l = 0; l < c.length; ++l) add_outer(m.XtD, 1, m.X.row(l), m.D.row(l));
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t j = 0; j < p.chunk; ++j) {
      c.set(p.da, i, h, j, j < i ? -dot(m.XtD.row(i), m.X.row(j), p.chunk) : 0);
    }
  }
}

// y_ij = f_i sum_d x_id k_jd E_ijd with E_ij = exp(G_i - G_j):
//     dx_id += f_i D_ij E_ijd k_jd       dk_jd += f_i D_ij E_ijd x_id
//     df_i  += D_ij sum_d x_id k_jd E_ijd
//     dG_id += f_i D_ij x_id k_jd E_ijd  dG_jd -= the same
// kkt: x = k, f = beta, j < i; scores: x = q, f = scale, j <= i, where i = j leaves G out.
void products(const Problem& p, const Chunk& c, int64_t h, Memory& m) {
  const bool is_scores = p.op == DELTIC_SCORES;
  const Matrix &x = is_scores ? m.rows.q : m.rows.k, &dx = is_scores ? m.dq : m.dk;
  const Matrix& k = m.rows.k;
  for (int64_t i = 0; i < c.length; ++i) {
    const double f = is_scores ? double{p.scale} : m.rows.beta_i[i];
    for (int64_t j = 0; j < (is_scores ? i + 1 : i); ++j) {
      const double* E = m.rows.decay(i, j);
      const double D = c.at(p.d_out, i, h, j);
      for (int64_t d = 0; d < p.K; ++d) {
        dx(i, d) += f * D * E[d] * k(j, d);
        m.dk(j, d) += f * D * E[d] * x(i, d);
        const double product = D * x(i, d) * k(j, d) * E[d];
        m.dbeta[i] += product;
        if (i == j) continue;
        m.dG(i, d) += f * product;
        m.dG(j, d) -= f * product;
      }
    }
  }
}

// w = A K' and u = A V' with K' = beta k exp(G) and V' = beta v; kg = k exp(G_last - G) and
// qg = q exp(G):
//     dA = d_w K'^T + d_u V'^T, lower      dK' = A^T d_w       dV' = A^T d_u
//     dk = beta exp(G) dK' + exp(G_last - G) d_kg              dq = exp(G) d_qg
//     dv = beta dV'                        dbeta = sum k exp(G) dK' + sum v dV'
//     dG = K' dK' + qg d_qg - kg d_kg      dG_last += sum_i kg_i d_kg_i
void wy(const Problem& p, const Chunk& c, int64_t h, Memory& m) {
  const Operands& rows = m.rows;
  const int64_t n = c.length, last = n - 1;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) m.A(i, j) = c.at(p.a, i, h, j);
    for (int64_t d = 0; d < p.K; ++d) {
      m.beta_k(i, d) = rows.beta_i[i] * rows.k(i, d) * std::exp(rows.G(i, d));
      m.d_w(i, d) = c.at_or_zero(p.d_w, i, h, d);
    }
    for (int64_t e = 0; e < p.V; ++e) {
      m.v(i, e) = c.at(p.v, i, h, e);
      m.d_u(i, e) = c.at_or_zero(p.d_u, i, h, e);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < p.chunk; ++j) {
      const double da = j > i ? 0
                              : dot(m.d_w.row(i), m.beta_k.row(j), p.K) +
                                    rows.beta_i[j] * dot(m.d_u.row(i), m.v.row(j), p.V);
      c.set(p.da, i, h, j, da);
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    double *dK = m.dx, *dV = m.dv;  // row j of dK' and dV'
    std::fill_n(dK, p.K, 0.0);
    std::fill_n(dV, p.V, 0.0);
    for (int64_t i = j; i < n; ++i) {
      add(m.A(i, j), m.d_w.row(i), dK, p.K);
      add(m.A(i, j), m.d_u.row(i), dV, p.V);
    }
    for (int64_t e = 0; e < p.V; ++e) {
      c.set(p.dv, j, h, e, rows.beta_i[j] * dV[e]);
      m.dbeta[j] += m.v(j, e) * dV[e];
    }
    for (int64_t d = 0; d < p.K; ++d) {
      const double exp_G = std::exp(rows.G(j, d)), k = rows.k(j, d), q = rows.q(j, d);
      const double d_qg = c.at_or_zero(p.d_qg, j, h, d), d_kg = c.at_or_zero(p.d_kg, j, h, d);
      const double exp_rest = std::exp(rows.G(last, d) - rows.G(j, d));
      m.dk(j, d) += rows.beta_i[j] * exp_G * dK[d] + exp_rest * d_kg;
      m.dq(j, d) += exp_G * d_qg;
      m.dbeta[j] += k * exp_G * dK[d];
      m.dG(j, d) += m.beta_k(j, d) * dK[d] + q * exp_G * d_qg - k * exp_rest * d_kg;
      m.dG(last, d) += k * exp_rest * d_kg;
    }
  }
}

// kkt, scores and wy of the value heads that read q/k head `k_head`.
void run_group(const Problem& p, const Chunk& c, int64_t k_head, Memory& m) {
  fill(m.dq, 0);
  fill(m.dk, 0);
  const int64_t group = p.HV / p.H;
  for (int64_t h = k_head * group; h < (k_head + 1) * group; ++h) {
    m.rows.load(c, h);
    fill(m.dG, 0);
    std::fill_n(m.dbeta, p.chunk, 0.0);
    p.op == DELTIC_WY ? wy(p, c, h, m) : products(p, c, h, m);
    for (int64_t i = 0; i < c.length; ++i) {
      c.set(p.dbeta, i, h, 0, m.dbeta[i]);
      // A gate per head is in every channel.
      for (int64_t d = 1; d < p.K && p.gate == Gate::head; ++d) m.dG(i, 0) += m.dG(i, d);
      for (int64_t d = 0; d < gate_width(p); ++d) c.set(p.dg, i, h, d, m.dG(i, d));
    }
  }
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < p.K; ++d) {
      c.set(p.dq, i, k_head, d, m.dq(i, d));
      c.set(p.dk, i, k_head, d, m.dk(i, d));
    }
  }
}

void run_chunk(const Problem& p, const Chunk& c, int64_t h, Memory& m, ParameterSums& sums) {
  switch (p.op) {
    case DELTIC_CUMSUM:
      return cumsum(p, c, h, sums);
    case DELTIC_GATE:
      return gate(p, c, h, sums);
    case DELTIC_L2NORM:
      return l2norm(p, c, h, m);
    case DELTIC_INVERSE:
      return inverse(p, c, h, m);
    default:
      return run_group(p, c, h, m);
  }
}

}  // namespace

size_t block_gradients_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  ParameterSums sums(p, scratch);
  return static_cast<size_t>(checked_sum(scratch.used(), chunk_bytes<Memory>(p)));
}

void run_block_gradients(const Problem& p, std::byte* workspace) {
  Scratch scratch(workspace);
  ParameterSums sums(p, scratch);
  sums.clear();
  for_each_chunk<Memory>(
      p, workspace + scratch.used(),
      [&](Memory& memory, const Chunk& c, int64_t head) { run_chunk(p, c, head, memory, sums); });
  sums.put_totals();
  put_zero_padding(p, p.dq, p.H, p.K);
  put_zero_padding(p, p.dk, p.H, p.K);
  put_zero_padding(p, p.dv, p.HV, p.V);
  put_zero_padding(p, p.dbeta, p.HV, 1);
  put_zero_padding(p, p.dg, p.HV, gate_width(p));
  put_zero_padding(p, p.dx, p.H, p.K);
  put_zero_padding(p, p.da, p.HV, p.chunk);
}

}  // namespace deltic::reference
