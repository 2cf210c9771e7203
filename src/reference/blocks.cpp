// The building blocks, chunk by chunk: the formulas of deltic_block_tensors.
#include "reference/chunk.h"
#include "reference/operations.h"

namespace deltic::reference {
namespace {

struct Memory {
  Memory(const Problem& p, std::byte* base)
      : scratch(base),
        rows(p, scratch),
        A(scratch, p.chunk, p.chunk),
        X(scratch, p.chunk, p.chunk),
        beta_k(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.K),
        beta_v(scratch, p.op == DELTIC_WY ? p.chunk : 0, p.V),
        x(scratch.take<double>(p.K)),
        w(scratch.take<double>(p.K)),
        u(scratch.take<double>(p.V)) {}
  Scratch scratch;
  Operands rows;
  Matrix A, X, beta_k, beta_v;
  double *x, *w, *u;
};

// out_i = scale (y_0 + ... + y_i) with y = max(log decay, -104); reverse: y_i + ... + y_last.
void cumsum(const Problem& p, const Chunk& c, int64_t h) {
  for (int64_t d = 0; d < gate_width(p); ++d) {
    double sum = 0;
    for (int64_t n = 0; n < c.length; ++n) {
      const int64_t i = p.reverse ? c.length - 1 - n : n;
      sum += std::max(log_decay(p, c.s.batch, c.begin + i, h, d), double{kMinLogDecay});
      c.set(p.out, i, h, d, p.scale * sum);
    }
  }
}

void gate(const Problem& p, const Chunk& c, int64_t h) {
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < gate_width(p); ++d) {
      c.set(p.out, i, h, d, log_decay(p, c.s.batch, c.begin + i, h, d));
    }
  }
}

void l2norm(const Problem& p, const Chunk& c, int64_t h, double* x) {
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < p.K; ++d) x[d] = c.at(p.x, i, h, d);
    const double r = reciprocal_norm(x, p.K);
    for (int64_t d = 0; d < p.K; ++d) c.set(p.out, i, h, d, x[d] * r);
    c.set(p.rstd, i, h, 0, r);
  }
}

// sum_d x_id k_jd exp(G_id - G_jd)
double gated_product(const Operands& rows, const Matrix& x, int64_t i, int64_t j) {
  const double* decay = rows.decay(i, j);
  double sum = 0;
  for (int64_t d = 0; d < rows.k.columns; ++d) sum += x(i, d) * rows.k(j, d) * decay[d];
  return sum;
}

// A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd) for j < i, else 0.
void kkt(const Operands& rows, int64_t length, const Matrix& A) {
  fill(A, 0);
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t j = 0; j < i; ++j) A(i, j) = rows.beta_i[i] * gated_product(rows, rows.k, i, j);
  }
}

// A_ij = scale sum_d q_id k_jd exp(G_id - G_jd) for j <= i, else 0.
void scores(const Problem& p, const Operands& rows, int64_t length, const Matrix& A) {
  fill(A, 0);
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t j = 0; j <= i; ++j) A(i, j) = p.scale * gated_product(rows, rows.q, i, j);
  }
}

// w = A (beta k exp(G)), u = A (beta v), kg = k exp(G_last - G), qg = q exp(G). A is lower.
void wy(const Problem& p, const Chunk& c, int64_t h, const Memory& m) {
  const Operands& rows = m.rows;
  const int64_t last = c.length - 1;
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t j = 0; j <= i; ++j) m.A(i, j) = c.at(p.a, i, h, j);
    for (int64_t d = 0; d < p.K; ++d) {
      m.beta_k(i, d) = rows.beta_i[i] * rows.k(i, d) * std::exp(rows.G(i, d));
      c.set(p.kg, i, h, d, rows.k(i, d) * std::exp(rows.G(last, d) - rows.G(i, d)));
      c.set(p.qg, i, h, d, rows.q(i, d) * std::exp(rows.G(i, d)));
    }
    for (int64_t e = 0; e < p.V; ++e) m.beta_v(i, e) = rows.beta_i[i] * c.at(p.v, i, h, e);
  }
  for (int64_t i = 0; i < c.length; ++i) {
    std::fill_n(m.w, p.K, 0.0);
    std::fill_n(m.u, p.V, 0.0);
    for (int64_t j = 0; j <= i; ++j) {
      add(m.A(i, j), m.beta_k.row(j), m.w, p.K);
      add(m.A(i, j), m.beta_v.row(j), m.u, p.V);
    }
    for (int64_t d = 0; d < p.K; ++d) c.set(p.w, i, h, d, m.w[d]);
    for (int64_t e = 0; e < p.V; ++e) c.set(p.u, i, h, e, m.u[e]);
  }
}

void put_matrix(const Chunk& c, const Rows& out, int64_t h, const Matrix& A) {
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t j = 0; j < A.columns; ++j) c.set(out, i, h, j, A(i, j));
  }
}

void run_chunk(const Problem& p, const Chunk& c, int64_t h, Memory& m) {
  switch (p.op) {
    case DELTIC_CUMSUM:
      return cumsum(p, c, h);
    case DELTIC_GATE:
      return gate(p, c, h);
    case DELTIC_L2NORM:
      return l2norm(p, c, h, m.x);
    case DELTIC_INVERSE:
      for (int64_t i = 0; i < c.length; ++i) {
        for (int64_t j = 0; j < i; ++j) m.A(i, j) = c.at(p.a, i, h, j);
      }
      invert(m.A, m.X, c.length);
      return put_matrix(c, p.out, h, m.X);
    default:
      break;
  }
  m.rows.load(c, h);
  switch (p.op) {
    case DELTIC_KKT:
      kkt(m.rows, c.length, m.A);
      return put_matrix(c, p.out, h, m.A);
    case DELTIC_SCORES:
      scores(p, m.rows, c.length, m.A);
      return put_matrix(c, p.out, h, m.A);
    case DELTIC_SCORES_INVERSE:
      scores(p, m.rows, c.length, m.A);
      put_matrix(c, p.out, h, m.A);
      kkt(m.rows, c.length, m.A);
      invert(m.A, m.X, c.length);
      return put_matrix(c, p.inverse, h, m.X);
    default:
      return wy(p, c, h, m);
  }
}

}  // namespace

size_t blocks_bytes(const Problem& p) { return chunk_bytes<Memory>(p); }

void run_blocks(const Problem& p, std::byte* workspace) {
  const int64_t group = p.HV / p.H;
  for_each_chunk<Memory>(p, workspace, [&](Memory& memory, const Chunk& c, int64_t head) {
    for (int64_t h = head * group; h < (head + 1) * group; ++h) run_chunk(p, c, h, memory);
  });
  const bool is_gate = p.op == DELTIC_CUMSUM || p.op == DELTIC_GATE;
  const bool is_norm = p.op == DELTIC_L2NORM;
  put_zero_padding(p, p.out, p.HV, is_gate ? gate_width(p) : is_norm ? p.K : p.chunk);
  put_zero_padding(p, p.inverse, p.HV, p.chunk);
  put_zero_padding(p, p.rstd, p.HV, 1);
  put_zero_padding(p, p.w, p.HV, p.K);
  put_zero_padding(p, p.u, p.HV, p.V);
  put_zero_padding(p, p.kg, p.HV, p.K);
  put_zero_padding(p, p.qg, p.HV, p.K);
}

}  // namespace deltic::reference
