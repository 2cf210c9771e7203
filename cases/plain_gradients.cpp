// The plain algorithm of the building blocks' gradients: their formulas in fp32, operands of
// products rounded.
#include "cases/plain.h"

namespace deltic::cases::plain {
namespace {

// Rows [token, token + rows) of a value head from a list [B,T,HV,width]; zeros where it is absent.
Floats rows_of(const Problem& p, const Floats& list, int64_t token, int64_t rows, int64_t h,
               int64_t width) {
  Floats out(static_cast<size_t>(rows * width), 0.0f);
  for (int64_t i = 0; i < rows && !list.empty(); ++i)
    std::copy_n(list.data() + ((token + i) * p.c.HV + h) * width, width, out.data() + i * width);
  return out;
}

// The lower triangle of a chunk's [R,R] from [B,T,HV,W]; `end`: how far past the diagonal, 0 or 1.
Floats triangle(const Problem& p, const Floats& list, int64_t token, int64_t rows, int64_t h,
                int64_t end) {
  Floats out(static_cast<size_t>(rows * rows), 0.0f);
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(list.data() + ((token + i) * p.c.HV + h) * p.c.chunk, i + end,
                out.data() + i * rows);
  return out;
}

// As load_chunk, of a block's inputs: g is the cumulative sum.
Chunk block_chunk(const Problem& p, int64_t token, int64_t rows, int64_t h) {
  const Case& c = p.c;
  Chunk x{rows, c.K, c.u ? c.V : 0, {}, {}, {}, {}, {}};
  x.k.resize(static_cast<size_t>(rows * c.K));
  x.q.assign(x.k.size(), 0.0f);
  x.G.resize(x.k.size());
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = (token + i) * c.HV + h;
    if (!p.q.empty()) p.load_row(p.q, token + i, p.k_head(h), x.q.data() + i * c.K);
    p.load_row(p.k, token + i, p.k_head(h), x.k.data() + i * c.K);
    x.beta.push_back(p.beta_at(row));
    for (int64_t d = 0; d < c.K; ++d) x.G[static_cast<size_t>(i * c.K + d)] = gate_at(p, row, d);
  }
  x.v = rows_of(p, p.v, token, rows, h, x.V);
  return x;
}

ChunkGradient zeros(const Chunk& x) {
  ChunkGradient r;
  for (Floats* list : {&r.dq, &r.dk, &r.dG}) list->assign(x.k.size(), 0.0f);
  r.dv.assign(x.v.size(), 0.0f);
  r.dbeta.assign(static_cast<size_t>(x.R), 0.0f);
  return r;
}

struct BlockGradients {
  const Problem& p;
  Output dv, dg, dbeta, da;
  Sums sums;
  BlockGradients(const Instance& i, const Problem& problem, Values& all)
      : p(problem),
        dv(make_output(i, all, "dv", 0.0)),
        dg(make_output(i, all, "dg", 0.0)),
        dbeta(make_output(i, all, "dbeta", 0.0)),
        da(make_output(i, all, "da", 0.0)),
        sums(problem) {}

  // Everything of a chunk but da. The gradient of a gate per head is the sum over channels.
  void put(int64_t token, int64_t h, const Chunk& x, const ChunkGradient& r) {
    const int64_t width = p.gate_width();
    sums.add_rows(p, token, h, r);
    for (int64_t i = 0; i < x.R; ++i) {
      const int64_t row = (token + i) * p.c.HV + h;
      dbeta.put(static_cast<size_t>(row), r.dbeta[static_cast<size_t>(i)]);
      for (int64_t c = 0; c < x.V; ++c)
        dv.put(static_cast<size_t>(row * x.V + c), r.dv[static_cast<size_t>(i * x.V + c)]);
      for (int64_t d = 0; d < width && p.c.gate != Gate::none; ++d) {
        float sum = 0;
        for (int64_t e = d; e < (width > 1 ? d + 1 : x.K); ++e)
          sum += r.dG[static_cast<size_t>(i * x.K + e)];
        dg.put(static_cast<size_t>(row * width + d), sum);
      }
    }
  }
  void put_square(int64_t token, int64_t rows, int64_t h, const Floats& square) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j)
        da.put(static_cast<size_t>(((token + i) * p.c.HV + h) * p.c.chunk + j),
               square[static_cast<size_t>(i * rows + j)]);
    }
  }
  // The sums over the group, which every operation with keys has.
  void put_rows(const Instance& instance, Values& all) const {
    const Output dq = make_output(instance, all, "dq", 0.0);
    const Output dk = make_output(instance, all, "dk", 0.0);
    for (size_t i = 0; i < sums.dk.size(); ++i) dq.put(i, sums.dq[i]), dk.put(i, sums.dk[i]);
  }
};

void kkt_gradient(const Problem& p, BlockGradients& out, const Floats& d_out) {
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    const Chunk x = block_chunk(p, token, rows, h);
    const Floats D = triangle(p, d_out, token, rows, h, 0), none(D.size(), 0.0f);
    ChunkGradient r = zeros(x);
    add_inner_scores(p, x, none, D, r);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        const float *ki = x.k.data() + i * x.K, *kj = x.k.data() + j * x.K;
        float kk = 0, same = 0;
        gated_products(p, ki, ki, kj, x.G.data() + i * x.K, x.G.data() + j * x.K, x.K, kk, same);
        r.dbeta[static_cast<size_t>(i)] += D[static_cast<size_t>(i * rows + j)] * kk;
      }
    }
    out.put(token, h, x, r);
  });
}

void scores_gradient(const Problem& p, BlockGradients& out, const Floats& d_out) {
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    const Chunk x = block_chunk(p, token, rows, h);
    const Floats D = triangle(p, d_out, token, rows, h, 1), none(D.size(), 0.0f);
    ChunkGradient r = zeros(x);
    add_inner_scores(p, x, D, none, r);
    out.put(token, h, x, r);
  });
}

// With X the inverse: dA = -(X^T D X^T) below the diagonal.
void inverse_gradient(const Problem& p, const BlockGradients& out, const Floats& d_out,
                      const Floats& result) {
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    const Floats X = result.empty() ? invert(triangle(p, p.a, token, rows, h, 0), rows, rows)
                                    : triangle(p, result, token, rows, h, 1);
    const Floats D = triangle(p, d_out, token, rows, h, 0);
    Floats dA = times_transposed(transposed_times(X, D, rows, rows, rows), X, rows, rows, rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j) {
        float& y = dA[static_cast<size_t>(i * rows + j)];
        y = j < i ? -y : 0.0f;
      }
    }
    out.put_square(token, rows, h, dA);
  });
}

struct WyIncoming {
  Floats w, u, kg, qg;
};

void wy_rows(const Chunk& x, const Floats& dbk, const Floats& dbv, const WyIncoming& d,
             ChunkGradient& r) {
  const int64_t R = x.R, K = x.K, V = x.V;
  for (int64_t i = 0; i < R; ++i) {
    const float beta = x.beta[static_cast<size_t>(i)];
    float& dbeta = r.dbeta[static_cast<size_t>(i)];
    for (int64_t c = 0; c < V; ++c) {
      const auto at = static_cast<size_t>(i * V + c);
      r.dv[at] = beta * dbv[at];
      dbeta += x.v[at] * dbv[at];
    }
    for (int64_t e = 0; e < K; ++e) {
      const auto at = static_cast<size_t>(i * K + e), last = static_cast<size_t>((R - 1) * K + e);
      const float decay = std::exp(x.G[at]), to_last = std::exp(x.G[last] - x.G[at]);
      r.dq[at] = decay * d.qg[at];
      r.dk[at] = beta * decay * dbk[at] + to_last * d.kg[at];
      dbeta += x.k[at] * decay * dbk[at];
      r.dG[at] += decay * (beta * x.k[at] * dbk[at] + x.q[at] * d.qg[at]);
      if (at == last) continue;
      const float carried = x.k[at] * to_last * d.kg[at];
      r.dG[at] -= carried;
      r.dG[last] += carried;
    }
  }
}

void wy_gradient(const Problem& p, BlockGradients& out) {
  const Floats d_w = p.floats("d_w"), d_u = p.floats("d_u"), d_kg = p.floats("d_kg"),
               d_qg = p.floats("d_qg");
  for_each_chunk(p, [&](int64_t token, int64_t R, int64_t h) {
    const Chunk x = block_chunk(p, token, R, h);
    const int64_t K = x.K, V = x.V;
    const WyIncoming d{p.operands(rows_of(p, d_w, token, R, h, K)),
                       p.operands(rows_of(p, d_u, token, R, h, V)),
                       rows_of(p, d_kg, token, R, h, K), rows_of(p, d_qg, token, R, h, K)};
    const Floats A = p.operands(triangle(p, p.a, token, R, h, 1));
    Floats bk(x.k.size()), bv(x.v.size());
    for (size_t i = 0; i < bk.size(); ++i)
      bk[i] = p.exp_operand(x.beta[i / static_cast<size_t>(K)] * x.k[i] * std::exp(x.G[i]));
    for (size_t i = 0; i < bv.size(); ++i)
      bv[i] = p.operand(x.beta[i / static_cast<size_t>(V)] * x.v[i]);
    ChunkGradient r = zeros(x);
    wy_rows(x, transposed_times(A, d.w, R, R, K), transposed_times(A, d.u, R, R, V), d, r);
    out.put(token, h, x, r);
    Floats dA = times_transposed(d.w, bk, R, K, R);
    const Floats from_u = times_transposed(d.u, bv, R, V, R);
    for (int64_t i = 0; i < R; ++i) {
      for (int64_t j = 0; j < R; ++j) {
        const auto at = static_cast<size_t>(i * R + j);
        dA[at] = j <= i ? dA[at] + from_u[at] : 0.0f;
      }
    }
    out.put_square(token, R, h, dA);
  });
}

// cumsum: the sum backwards, nothing below the clamp; then the gate's form.
void gate_gradient(const Problem& p, BlockGradients& out, const Floats& d_out) {
  const Case& c = p.c;
  const int64_t width = p.gate_width();
  const float scale = c.scale ? static_cast<float>(*c.scale) : 1.0f;
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    for (int64_t d = 0; d < width; ++d) {
      float sum = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (token + (c.reverse ? r : rows - 1 - r)) * c.HV + h;
        const float y = d_out[static_cast<size_t>(row * width + d)];
        sum += scale * y;
        const bool is_clamped = p.log_decay(row, h, d) < kMinLogDecay;
        put_gate(p, out.dg, out.sums, row, h, d, c.op == Op::gate ? y : is_clamped ? 0.0f : sum);
      }
    }
  });
}

// dx = r (dy - y (y . dy))
void norm_gradient(const Problem& p, const Output& dx, const Floats& d_out) {
  const Case& c = p.c;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t r = p.first_token(n) * c.H; r < (p.first_token(n) + c.sequence_length(n)) * c.H;
         ++r) {
      const float *x = p.x.data() + r * c.K, *dy = d_out.data() + r * c.K;
      float squares = 0, along = 0;
      for (int64_t d = 0; d < c.K; ++d) squares += x[d] * x[d], along += x[d] * dy[d];
      const float factor = 1.0f / std::sqrt(squares + kNormEps);
      for (int64_t d = 0; d < c.K; ++d)
        dx.put(static_cast<size_t>(r * c.K + d),
               factor * (dy[d] - x[d] * (along * factor * factor)));
    }
  }
}

}  // namespace

Values block_gradient(const Instance& instance) {
  const Op op = instance.spec().op;
  const Problem p(instance);
  Values all;
  const Floats d_out = p.floats("d_out");
  if (op == Op::l2norm) {
    norm_gradient(p, make_output(instance, all, "dx", 0.0), d_out);
    return all;
  }
  BlockGradients out(instance, p, all);
  if (op == Op::cumsum || op == Op::gate) {
    gate_gradient(p, out, d_out);
    put_parameters(instance, all, out.sums);
    return all;
  }
  if (op == Op::kkt) kkt_gradient(p, out, d_out);
  if (op == Op::scores) scores_gradient(p, out, d_out);
  if (op == Op::inverse) inverse_gradient(p, out, d_out, p.floats("out"));
  if (op == Op::wy) wy_gradient(p, out);
  out.put_rows(instance, all);
  return all;
}

}  // namespace deltic::cases::plain
