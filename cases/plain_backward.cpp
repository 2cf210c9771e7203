// The plain algorithm of backward: the chunked form differentiated step by step, from the last
// chunk to the first, operands of products rounded, everything else fp32. With a beta or a decay
// per value column, of which chunks know nothing: the recurrence, token by token, in fp32.
#include "cases/plain.h"

namespace deltic::cases::plain {

Floats times_transposed(const Floats& A, const Floats& B, int64_t I, int64_t M, int64_t N) {
  Floats turned(static_cast<size_t>(M * N)), C(static_cast<size_t>(I * N), 0.0f);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t m = 0; m < M; ++m) {
      turned[static_cast<size_t>(m * N + n)] = B[static_cast<size_t>(n * M + m)];
    }
  }
  multiply(A.data(), turned.data(), C.data(), I, M, N);
  return C;
}
Floats transposed_times(const Floats& A, const Floats& B, int64_t I, int64_t M, int64_t N) {
  Floats C(static_cast<size_t>(M * N), 0.0f);
  for (int64_t i = 0; i < I; ++i) {
    for (int64_t m = 0; m < M; ++m) {
      const float a = A[static_cast<size_t>(i * M + m)];
      float* row = C.data() + m * N;
      const float* b = B.data() + i * N;
      for (int64_t n = 0; n < N; ++n) row[n] += a * b[n];
    }
  }
  return C;
}

void add_inner_scores(const Problem& p, const Chunk& x, const Floats& dP, const Floats& dL,
                      ChunkGradient& r) {
  const int64_t R = x.R, K = x.K;
  const float scale = p.scale();
  const bool by_channel = p.c.gate == Gate::channel;
  Floats q_rows(x.q.size(), 0.0f), k_rows(q_rows), columns(q_rows);
  for (int64_t i = 0; i < R; ++i) {
    const float beta = x.beta[static_cast<size_t>(i)];
    for (int64_t j = 0; j <= i; ++j) {
      const float *qi = x.q.data() + i * K, *ki = x.k.data() + i * K, *kj = x.k.data() + j * K;
      const float *Gi = x.G.data() + i * K, *Gj = x.G.data() + j * K;
      const auto at = static_cast<size_t>(i * R + j);
      const float head_decay = by_channel ? 1.0f : std::exp(Gi[0] - Gj[0]);
      const float score = p.operand(scale * dP[at] * head_decay);
      const float pair = p.operand(beta * dL[at] * head_decay);
      for (int64_t d = 0; d < K; ++d) {
        const float e = by_channel ? std::exp(Gi[d] - Gj[d]) : 1.0f;
        const auto to_i = static_cast<size_t>(i * K + d), to_j = static_cast<size_t>(j * K + d);
        const float right = p.exp_operand(kj[d] * e);
        if (j == i) {
          r.dq[to_i] += score * right;
          r.dk[to_i] += score * p.exp_operand(qi[d] * e);
          continue;
        }
        q_rows[to_i] += score * right;
        k_rows[to_i] += pair * right;
        columns[to_j] += score * p.exp_operand(qi[d] * e) + pair * p.exp_operand(ki[d] * e);
      }
    }
  }
  for (size_t i = 0; i < q_rows.size(); ++i) {
    r.dq[i] += q_rows[i];
    r.dk[i] += k_rows[i] + columns[i];
    r.dG[i] += x.q[i] * q_rows[i] + x.k[i] * (k_rows[i] - columns[i]);
  }
}

namespace {

// D: the gradient of the state after the chunk, then of the one before it.
ChunkGradient chunk_gradient(const Problem& p, const Chunk& x, const Inner& m, const Floats& S,
                             const Floats& d_o, Floats& D) {
  const int64_t R = x.R, K = x.K, V = x.V;
  const float* last = x.G.data() + (R - 1) * K;
  const Floats v_new = p.operands(m.v_new), D_operand = p.operands(D);
  Floats kg(x.k.size());
  for (size_t i = 0; i < kg.size(); ++i) {
    kg[i] = p.exp_operand(x.k[i] * std::exp(last[static_cast<int64_t>(i) % K] - x.G[i]));
  }
  Floats d_v_new = transposed_times(m.Aqk, d_o, R, R, V);
  multiply(kg.data(), D_operand.data(), d_v_new.data(), R, K, V);
  d_v_new = p.operands(std::move(d_v_new));
  const Floats dP = times_transposed(d_o, v_new, R, V, R);
  const Floats dqg = times_transposed(d_o, m.S, R, V, K);
  const Floats dkg = times_transposed(v_new, D_operand, R, V, K);
  Floats dw = times_transposed(d_v_new, m.S, R, V, K);
  for (float& y : dw) y = p.operand(-y);
  const Floats dbv = transposed_times(m.A, d_v_new, R, R, V);
  const Floats dbk = transposed_times(m.A, dw, R, R, K);
  // dL = -(A^T dA A^T) below the diagonal
  Floats dA = times_transposed(d_v_new, m.bv, R, V, R);
  const Floats from_w = times_transposed(dw, m.bk, R, K, R);
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < R; ++j) {
      const auto at = static_cast<size_t>(i * R + j);
      dA[at] = j < i ? p.operand(dA[at] + from_w[at]) : 0.0f;
    }
  }
  Floats dL = times_transposed(p.operands(transposed_times(m.A, dA, R, R, R)), m.A, R, R, R);
  for (float& y : dL) y = -y;

  ChunkGradient r;
  for (Floats* list : {&r.dq, &r.dk, &r.dG}) list->assign(x.q.size(), 0.0f);
  r.dv.resize(x.v.size());
  r.dbeta.assign(static_cast<size_t>(R), 0.0f);
  const float scale = p.scale();
  for (int64_t i = 0; i < R; ++i) {
    const float beta = x.beta[static_cast<size_t>(i)];
    float& dbeta = r.dbeta[static_cast<size_t>(i)];
    for (int64_t c = 0; c < V; ++c) {
      const auto at = static_cast<size_t>(i * V + c);
      r.dv[at] = beta * dbv[at];
      dbeta += x.v[at] * dbv[at];
    }
    for (int64_t d = 0; d < K; ++d) {
      const auto at = static_cast<size_t>(i * K + d);
      const auto at_last = static_cast<size_t>((R - 1) * K + d);
      const float e = std::exp(x.G[at]), to_last = std::exp(last[d] - x.G[at]);
      r.dq[at] += scale * e * dqg[at];
      r.dk[at] += to_last * dkg[at] + beta * e * dbk[at];
      dbeta += x.k[at] * e * dbk[at];
      r.dG[at] += e * (scale * x.q[at] * dqg[at] + beta * x.k[at] * dbk[at]);
      if (at == at_last) continue;
      const float carried = x.k[at] * to_last * dkg[at];
      r.dG[at] -= carried;
      r.dG[at_last] += carried;
    }
    for (int64_t j = 0; j < i; ++j) {
      const auto at = static_cast<size_t>(i * R + j);
      dbeta += dL[at] * m.kk[at];
    }
  }
  add_inner_scores(p, x, dP, dL, r);

  // dS = exp(G_last) D + scale (q exp(G))^T do - w^T d(v_new)
  const Floats from_o = transposed_times(m.qg, d_o, R, K, V);
  const Floats from_v = transposed_times(m.w, d_v_new, R, K, V);
  for (int64_t d = 0; d < K; ++d) {
    const float decay = std::exp(last[d]);
    float& dG = r.dG[static_cast<size_t>((R - 1) * K + d)];
    for (int64_t c = 0; c < V; ++c) {
      const auto at = static_cast<size_t>(d * V + c);
      const float carried = decay * D[at];
      dG += carried * S[at];
      D[at] = carried + scale * from_o[at] - from_v[at];
    }
  }
  return r;
}

struct GradientOutputs {
  Output dq, dk, dv, dbeta, dg, dgv, d_initial;
  GradientOutputs(const Instance& i, Values& all)
      : dq(make_output(i, all, "dq", 0.0)),
        dk(make_output(i, all, "dk", 0.0)),
        dv(make_output(i, all, "dv", 0.0)),
        dbeta(make_output(i, all, "dbeta", 0.0)),
        dg(make_output(i, all, "dg", 0.0)),
        dgv(make_output(i, all, "dgv", 0.0)),
        d_initial(make_output(i, all, "d_initial_state", 0.0)) {}
};

}  // namespace

Sums::Sums(const Problem& p)
    : dq(p.k.size(), 0.0f),
      dk(p.k.size(), 0.0f),
      dA_log(static_cast<size_t>(p.c.HV), 0.0f),
      ddt_bias(static_cast<size_t>(p.c.HV * p.gate_width()), 0.0f) {}

void Sums::add_rows(const Problem& p, int64_t token, int64_t h, const ChunkGradient& r) {
  const auto rows = static_cast<int64_t>(r.dk.size()) / p.c.K;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t k_row = ((token + i) * p.c.H + p.k_head(h)) * p.c.K;
    for (int64_t d = 0; d < p.c.K; ++d) {
      dq[static_cast<size_t>(k_row + d)] += r.dq[static_cast<size_t>(i * p.c.K + d)];
      dk[static_cast<size_t>(k_row + d)] += r.dk[static_cast<size_t>(i * p.c.K + d)];
    }
  }
}

void put_gate(const Problem& p, const Output& out, Sums& sums, int64_t row, int64_t h, int64_t d,
              float dy) {
  const int64_t width = p.gate_width();
  float dg = dy, dA = 0;
  if (p.c.form != GateForm::log_decay) {
    const Problem::RawGate r = p.raw_gate(row, h, d);
    if (dy == 0) {  // a decay of 0 passes nothing on, and the form may be infinite there
      dg = 0;
    } else if (p.c.form == GateForm::softplus) {
      dg = -r.A * sigmoid(r.x) * dy;
      dA = -r.A * softplus(r.x) * dy;
    } else {
      const float slope =
          static_cast<float>(p.c.lower_bound) * sigmoid(r.A * r.x) * sigmoid(-r.A * r.x);
      dg = slope * r.A * dy;
      dA = dg * r.x;
    }
    sums.dA_log[static_cast<size_t>(h)] += dA;
    sums.ddt_bias[static_cast<size_t>(h * width + d)] += dg;
  }
  out.put(static_cast<size_t>(row * width + d), dg);
}

void put_parameters(const Instance& instance, Values& all, const Sums& sums) {
  const Output dA_log = make_output(instance, all, "dA_log", 0.0);
  const Output ddt_bias = make_output(instance, all, "ddt_bias", 0.0);
  for (size_t i = 0; i < sums.dA_log.size(); ++i) dA_log.put(i, sums.dA_log[i]);
  for (size_t i = 0; i < sums.ddt_bias.size(); ++i) ddt_bias.put(i, sums.ddt_bias[i]);
}

namespace {

// Of the raw beta that stands at `at`.
void put_beta(const Problem& p, const GradientOutputs& out, int64_t at, float dbeta) {
  if (p.c.beta == Beta::sigmoid || p.c.beta == Beta::two_sigmoid) {
    const float b = p.beta[static_cast<size_t>(at)];
    dbeta *= (p.c.beta == Beta::two_sigmoid ? 2.0f : 1.0f) * sigmoid(b) * sigmoid(-b);
  }
  out.dbeta.put(static_cast<size_t>(at), dbeta);
}

// dy: of a token's log decays.
void put_gates(const Problem& p, const GradientOutputs& out, Sums& sums, int64_t row, int64_t h,
               const Floats& dy) {
  for (int64_t d = 0; d < p.gate_width() && p.c.gate != Gate::none; ++d) {
    // Below the clamp the decay is 0 whatever the gate is: nothing comes back, and the rounding
    // of dG times a log decay of -1000 must not either.
    const bool is_clamped = p.log_decay(row, h, d) < kMinLogDecay;
    put_gate(p, out.dg, sums, row, h, d, is_clamped ? 0.0f : dy[static_cast<size_t>(d)]);
  }
}

void put_chunk(const Problem& p, const GradientOutputs& out, Sums& sums, int64_t token, int64_t h,
               const Chunk& x, const ChunkGradient& r) {
  const int64_t K = x.K, V = x.V, width = p.gate_width();
  Floats dy(static_cast<size_t>(K), 0.0f);  // of the log decay: dG summed from the chunk's end
  sums.add_rows(p, token, h, r);
  for (int64_t i = x.R - 1; i >= 0; --i) {
    const int64_t row = (token + i) * p.c.HV + h;
    for (int64_t c = 0; c < V; ++c) {
      out.dv.put(static_cast<size_t>(row * V + c), r.dv[static_cast<size_t>(i * V + c)]);
    }
    put_beta(p, out, row, r.dbeta[static_cast<size_t>(i)]);
    for (int64_t d = 0; d < K; ++d) {
      dy[static_cast<size_t>(width > 1 ? d : 0)] += r.dG[static_cast<size_t>(i * K + d)];
    }
    put_gates(p, out, sums, row, h, dy);
  }
}

// Through the norm, where there is one: dx = r (dy - y (y . dy)). Of a row of one channel 1e-6 of
// dy is left, less than the rounding of y to fp32: hence fp64 here.
void put_rows(const Problem& p, const Floats& x, const Floats& dy, const Output& out, int64_t n) {
  const auto K = static_cast<size_t>(p.c.K);
  for (int64_t t = p.first_token(n); t < p.first_token(n) + p.c.sequence_length(n); ++t) {
    for (int64_t h = 0; h < p.c.H; ++h) {
      const size_t first = static_cast<size_t>(t * p.c.H + h) * K;
      double square = 0, along = 0, factor = 1;
      for (size_t i = first; i < first + K && p.c.l2norm; ++i) {
        square += static_cast<double>(x[i]) * x[i];
        along += static_cast<double>(x[i]) * dy[i];
      }
      if (p.c.l2norm) factor = 1 / std::sqrt(square + kNormEps);
      for (size_t i = first; i < first + K; ++i) {
        out.put(i, static_cast<float>(factor * (dy[i] - factor * factor * x[i] * along)));
      }
    }
  }
}

Floats final_gradient(const Problem& p, int64_t n, int64_t h) {
  const int64_t K = p.c.K, V = p.c.V;
  Floats D(static_cast<size_t>(K * V), 0.0f);
  for (int64_t i = 0; i < K * V && !p.d_final.empty(); ++i) {
    D[static_cast<size_t>(i)] = p.d_final[p.state_at(n, h, i / V, i % V)];
  }
  return D;
}
void put_initial(const Problem& p, const GradientOutputs& out, int64_t n, int64_t h,
                 const Floats& D) {
  for (int64_t i = 0; i < p.c.K * p.c.V; ++i) {
    out.d_initial.put(p.state_at(n, h, i / p.c.V, i % p.c.V), D[static_cast<size_t>(i)]);
  }
}

// One token of the recurrence: S' = a S b, e = v - S'^T k, u = beta e.
struct Token {
  Floats q, k, a, b, e, u, decayed;  // decayed: S' [K,V]

  Token(const Problem& p, int64_t token, int64_t h, const Floats& S)
      : q(static_cast<size_t>(p.c.K)),
        k(q.size()),
        a(q.size(), 1.0f),
        b(static_cast<size_t>(p.c.V), 1.0f),
        e(b.size()),
        u(b.size()),
        decayed(S) {
    const int64_t row = token * p.c.HV + h;
    const auto V = b.size();
    p.load_row(p.q, token, p.k_head(h), q.data());
    p.load_row(p.k, token, p.k_head(h), k.data());
    for (size_t d = 0; d < a.size() && p.c.gate != Gate::none; ++d) {
      a[d] = std::exp(std::max(kMinLogDecay, p.log_decay(row, h, static_cast<int64_t>(d))));
    }
    for (size_t c = 0; c < V && p.c.gv; ++c) {
      b[c] = std::exp(std::max(kMinLogDecay, p.gv[static_cast<size_t>(row) * V + c]));
    }
    for (size_t c = 0; c < V; ++c) e[c] = p.v[static_cast<size_t>(row) * V + c];
    for (size_t i = 0; i < decayed.size(); ++i) {
      decayed[i] *= a[i / V] * b[i % V];
      e[i % V] -= decayed[i] * k[i / V];
    }
    for (size_t c = 0; c < V; ++c) u[c] = p.beta_at(row, static_cast<int64_t>(c)) * e[c];
  }
  Floats after() const {
    Floats S = decayed;
    for (size_t i = 0; i < S.size(); ++i) S[i] += k[i / b.size()] * u[i % b.size()];
    return S;
  }
};

// D: the gradient of the state after the token, then of the one before it.
void put_token(const Problem& p, const GradientOutputs& out, Sums& sums, int64_t token, int64_t h,
               const Token& x, Floats& D) {
  const int64_t row = token * p.c.HV + h;
  const auto V = x.b.size(), first = static_cast<size_t>(row) * V;
  const Floats S = x.after();
  Floats du(V, 0.0f), de(V), dbeta(V), dgv(V, 0.0f), dy(x.q.size(), 0.0f);
  ChunkGradient r;
  r.dq.assign(x.q.size(), 0.0f), r.dk.assign(x.q.size(), 0.0f);
  for (size_t i = 0; i < D.size(); ++i) {
    const float d_o = p.d_o.empty() ? 0.0f : p.scale() * p.d_o[first + i % V];
    r.dq[i / V] += S[i] * d_o;
    D[i] += x.q[i / V] * d_o;
    r.dk[i / V] += D[i] * x.u[i % V];
    du[i % V] += D[i] * x.k[i / V];
  }
  for (size_t c = 0; c < V; ++c) {
    de[c] = p.beta_at(row, static_cast<int64_t>(c)) * du[c];
    dbeta[c] = du[c] * x.e[c];
    out.dv.put(first + c, de[c]);
  }
  for (size_t i = 0; i < D.size(); ++i) {
    r.dk[i / V] -= x.decayed[i] * de[i % V];
    D[i] -= x.k[i / V] * de[i % V];
    const float carried = x.decayed[i] * D[i];
    dy[p.gate_width() > 1 ? i / V : 0] += carried;
    dgv[i % V] += carried;
    D[i] *= x.a[i / V] * x.b[i % V];
  }
  float total = 0;
  for (size_t c = 0; c < V; ++c) {
    const bool is_clamped = p.c.gv && p.gv[first + c] < kMinLogDecay;
    out.dgv.put(first + c, is_clamped ? 0.0f : dgv[c]);
    total += dbeta[c];
    if (p.c.betavec) put_beta(p, out, row * p.c.V + static_cast<int64_t>(c), dbeta[c]);
  }
  if (!p.c.betavec && !p.beta.empty()) put_beta(p, out, row, total);
  sums.add_rows(p, token, h, r);
  put_gates(p, out, sums, row, h, dy);
}

void run_head_by_tokens(const Problem& p, const GradientOutputs& out, Sums& sums, int64_t n,
                        int64_t h) {
  std::vector<Token> tokens;
  Floats S = first_state(p, n, h), D = final_gradient(p, n, h);
  for (int64_t t = 0; t < p.c.sequence_length(n); ++t) {
    tokens.emplace_back(p, p.first_token(n) + t, h, S);
    S = tokens.back().after();
  }
  for (int64_t t = p.c.sequence_length(n) - 1; t >= 0; --t) {
    put_token(p, out, sums, p.first_token(n) + t, h, tokens[static_cast<size_t>(t)], D);
  }
  put_initial(p, out, n, h, D);
}

void run_head(const Problem& p, const GradientOutputs& out, Sums& sums, int64_t n, int64_t h) {
  if (p.c.betavec || p.c.gv) return run_head_by_tokens(p, out, sums, n, h);
  const int64_t length = p.c.sequence_length(n), V = p.c.V;
  std::vector<Floats> states = {first_state(p, n, h)};
  std::vector<Inner> inner;
  std::vector<Chunk> chunks;
  for (int64_t begin = 0; begin < length; begin += p.c.chunk) {
    const int64_t rows = std::min<int64_t>(p.c.chunk, length - begin);
    chunks.push_back(load_chunk(p, p.first_token(n) + begin, rows, h));
    inner.push_back(make_inner(p, chunks.back(), states.back()));
    states.push_back(next_state(p, chunks.back(), states.back(), inner.back().v_new, rows));
  }
  Floats D = final_gradient(p, n, h);
  for (size_t i = chunks.size(); i-- > 0;) {
    const Chunk& x = chunks[i];
    const int64_t token = p.first_token(n) + static_cast<int64_t>(i) * p.c.chunk;
    Floats d_o(x.v.size(), 0.0f);
    for (int64_t r = 0; r < x.R && !p.d_o.empty(); ++r) {
      std::copy_n(p.d_o.data() + ((token + r) * p.c.HV + h) * V, V, d_o.data() + r * V);
    }
    put_chunk(p, out, sums, token, h, x, chunk_gradient(p, x, inner[i], states[i], d_o, D));
  }
  put_initial(p, out, n, h, D);
}

}  // namespace

Values backward(const Instance& instance) {
  const Problem p(instance);
  const int64_t group = p.c.HV / p.c.H;
  Values all;
  const GradientOutputs out(instance, all);
  Sums sums(p);
  // Value heads of a group share rows of dq and dk; sequences share sums of parameters.
#pragma omp parallel for schedule(dynamic) if (p.is_large())
  for (int64_t key_head = 0; key_head < p.c.H; ++key_head) {
    for (int64_t n = 0; n < p.c.num_sequences(); ++n) {
      for (int64_t i = 0; i < group; ++i) run_head(p, out, sums, n, key_head * group + i);
    }
  }
  for (int64_t n = 0; n < p.c.num_sequences(); ++n) {
    put_rows(p, p.q, sums.dq, out.dq, n);
    put_rows(p, p.k, sums.dk, out.dk, n);
  }
  put_parameters(instance, all, sums);
  return all;
}

}  // namespace deltic::cases::plain
