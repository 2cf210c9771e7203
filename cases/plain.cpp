// The plain algorithm: the textbook chunked form in fp32 with rounded operands, one function per
// operation. It is a measure of what a straightforward implementation loses, so it has no tricks
// and no blocks.
#include "cases/plain.h"

namespace deltic::cases {
namespace plain {

Output make_output(const Instance& instance, Values& all, const char* name, double start) {
  if (!instance.has(name)) return {};
  const Tensor& t = instance.tensor(name);
  if (t.role == Role::input) return {};
  std::vector<double>& list = all[name];
  list.assign(static_cast<size_t>(t.view.numel()), start);
  return {&list, static_cast<DType>(t.view.dtype)};
}
Floats first_state(const Problem& p, int64_t n, int64_t h) {
  Floats S(static_cast<size_t>(p.c.K * p.c.V), 0.0f);
  const int64_t slot = p.read_slot(n);
  if (slot < 0) return S;
  for (int64_t d = 0; d < p.c.K; ++d) {
    for (int64_t j = 0; j < p.c.V; ++j) {
      S[static_cast<size_t>(d * p.c.V + j)] = p.state[p.state_at(slot, h, d, j)];
    }
  }
  return S;
}

Chunk load_chunk(const Problem& p, int64_t token, int64_t rows, int64_t h) {
  const Case& c = p.c;
  Chunk x{rows, c.K, c.V, {}, {}, {}, {}, {}};
  x.q.resize(static_cast<size_t>(rows * c.K));
  x.k.resize(x.q.size());
  x.v.resize(static_cast<size_t>(rows * c.V));
  x.beta.resize(static_cast<size_t>(rows));
  x.G.assign(x.q.size(), 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = (token + i) * c.HV + h;
    p.load_row(p.q, token + i, p.k_head(h), x.q.data() + i * c.K);
    p.load_row(p.k, token + i, p.k_head(h), x.k.data() + i * c.K);
    std::copy_n(p.v.data() + row * c.V, c.V, x.v.data() + i * c.V);
    x.beta[static_cast<size_t>(i)] = p.beta_at(row);
    if (c.gate == Gate::none) continue;
    for (int64_t d = 0; d < c.K; ++d) {
      const float before = i == 0 ? 0.0f : x.G[static_cast<size_t>((i - 1) * c.K + d)];
      x.G[static_cast<size_t>(i * c.K + d)] =
          before + std::max(kMinLogDecay, p.log_decay(row, h, d));
    }
  }
  return x;
}

void gated_products(const Problem& p, const float* ai, const float* bi, const float* kj,
                    const float* Gi, const float* Gj, int64_t K, float& with_a, float& with_b) {
  with_a = with_b = 0;
  if (p.c.gate == Gate::channel) {
    for (int64_t d = 0; d < K; ++d) {
      const float e = std::exp(Gi[d] - Gj[d]);
      const float right = p.operand(kj[d]);
      with_a += p.exp_operand(ai[d] * e) * right;
      with_b += p.exp_operand(bi[d] * e) * right;
    }
    return;
  }
  for (int64_t d = 0; d < K; ++d) {
    with_a += p.operand(ai[d]) * p.operand(kj[d]);
    with_b += p.operand(bi[d]) * p.operand(kj[d]);
  }
  const float e = p.c.gate == Gate::head ? std::exp(Gi[0] - Gj[0]) : 1.0f;
  with_a *= e;
  with_b *= e;
}

Floats invert(const Floats& L, int64_t R, int64_t W) {
  Floats A(static_cast<size_t>(R * W), 0.0f);
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const float l = L[static_cast<size_t>(i * W + j)];
      for (int64_t m = 0; m <= j; ++m)
        A[static_cast<size_t>(i * W + m)] -= l * A[static_cast<size_t>(j * W + m)];
    }
    A[static_cast<size_t>(i * W + i)] = 1.0f;
  }
  return A;
}

void multiply(const float* A, const float* B, float* C, int64_t I, int64_t M, int64_t N) {
  for (int64_t i = 0; i < I; ++i) {
    for (int64_t m = 0; m < M; ++m) {
      const float a = A[i * M + m];
      for (int64_t n = 0; n < N; ++n) C[i * N + n] += a * B[m * N + n];
    }
  }
}

Floats next_state(const Problem& p, const Chunk& x, const Floats& S, const Floats& v_new,
                  int64_t rows) {
  Floats left(static_cast<size_t>(x.K * rows)), right(static_cast<size_t>(rows * x.V)),
      out(S.size());
  const float* last = x.G.data() + (rows - 1) * x.K;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < x.K; ++d) {
      left[static_cast<size_t>(d * rows + i)] =
          p.exp_operand(x.k[static_cast<size_t>(i * x.K + d)] *
                        std::exp(last[d] - x.G[static_cast<size_t>(i * x.K + d)]));
    }
  }
  for (size_t i = 0; i < right.size(); ++i) right[i] = p.operand(v_new[i]);
  for (int64_t d = 0; d < x.K; ++d) {
    const float decay = std::exp(last[d]);
    for (int64_t j = 0; j < x.V; ++j) {
      out[static_cast<size_t>(d * x.V + j)] = decay * S[static_cast<size_t>(d * x.V + j)];
    }
  }
  multiply(left.data(), right.data(), out.data(), x.K, rows, x.V);
  return out;
}

Inner make_inner(const Problem& p, const Chunk& x, const Floats& S) {
  const int64_t R = x.R, K = x.K, V = x.V;
  const float scale = p.scale();
  Inner m;
  m.kk.assign(static_cast<size_t>(R * R), 0.0f);
  m.Aqk.assign(m.kk.size(), 0.0f);
  Floats L(m.kk.size(), 0.0f);
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      float kk = 0, qk = 0;
      gated_products(p, x.k.data() + i * K, x.q.data() + i * K, x.k.data() + j * K,
                     x.G.data() + i * K, x.G.data() + j * K, K, kk, qk);
      const auto at = static_cast<size_t>(i * R + j);
      if (j < i) m.kk[at] = kk, L[at] = x.beta[static_cast<size_t>(i)] * kk;
      m.Aqk[at] = p.operand(scale * qk);
    }
  }
  m.A = p.operands(invert(L, R, R));
  m.bv.resize(static_cast<size_t>(R * V));
  m.bk.resize(static_cast<size_t>(R * K));
  m.qg.resize(m.bk.size());
  for (int64_t i = 0; i < R; ++i) {
    const float b = x.beta[static_cast<size_t>(i)];
    for (int64_t j = 0; j < V; ++j) {
      m.bv[static_cast<size_t>(i * V + j)] = p.operand(b * x.v[static_cast<size_t>(i * V + j)]);
    }
    for (int64_t d = 0; d < K; ++d) {
      const auto at = static_cast<size_t>(i * K + d);
      const float e = std::exp(x.G[at]);
      m.bk[at] = p.exp_operand(b * x.k[at] * e);
      m.qg[at] = p.exp_operand(x.q[at] * e);
    }
  }
  Floats w(m.bk.size(), 0.0f), ws(m.bv.size(), 0.0f);
  m.v_new.assign(m.bv.size(), 0.0f);
  multiply(m.A.data(), m.bv.data(), m.v_new.data(), R, R, V);
  multiply(m.A.data(), m.bk.data(), w.data(), R, R, K);
  m.w = p.operands(std::move(w));
  m.S = p.operands(S);
  multiply(m.w.data(), m.S.data(), ws.data(), R, K, V);
  for (size_t i = 0; i < m.v_new.size(); ++i) m.v_new[i] -= ws[i];
  return m;
}

namespace {

// States of one call: final state or pool, and checkpoints.
struct StateOutputs {
  Output final_state, pool, ckpt;
  StateOutputs(const Instance& i, Values& all)
      : final_state(make_output(i, all, "final_state", NAN)),
        pool(make_output(i, all, i.spec().write_pool ? "write_pool" : "state_pool", NAN)),
        ckpt(make_output(i, all, "ckpt_states", NAN)) {}
  static void put(const Problem& p, const Output& to, int64_t slot, int64_t h, const Floats& S) {
    for (int64_t d = 0; d < p.c.K; ++d) {
      for (int64_t j = 0; j < p.c.V; ++j) {
        to.put(p.state_at(slot, h, d, j), S[static_cast<size_t>(d * p.c.V + j)]);
      }
    }
  }
  void put_final(const Problem& p, int64_t n, int64_t h, const Floats& S) const {
    if (final_state.values != nullptr) put(p, final_state, n, h, S);
    if (p.c.pool == Pool::none) return;
    const int64_t slot = p.instance.write_slots()[static_cast<size_t>(n)];
    if (slot >= 0) put(p, pool, slot, h, S);
  }
};

void keep_checkpoints(const Problem& p, const StateOutputs& out, int64_t n, int64_t h,
                      int64_t token, const Floats& S) {
  if (p.ckpt_cu.empty()) return;
  for (int64_t m = p.ckpt_cu[static_cast<size_t>(n)]; m < p.ckpt_cu[static_cast<size_t>(n + 1)];
       ++m) {
    const auto i = static_cast<size_t>(m);
    if (p.ckpt_tokens[i] == token && p.ckpt_slots[i] > p.c.null_slot) {
      StateOutputs::put(p, out.ckpt, p.ckpt_slots[i], h, S);
    }
  }
}
bool wants_checkpoint(const Problem& p, int64_t n, int64_t token) {
  if (p.ckpt_cu.empty()) return false;
  for (int64_t m = p.ckpt_cu[static_cast<size_t>(n)]; m < p.ckpt_cu[static_cast<size_t>(n + 1)];
       ++m) {
    if (p.ckpt_tokens[static_cast<size_t>(m)] == token) return true;
  }
  return false;
}
void forward_chunk(const Problem& p, const StateOutputs& out, const Output& o, int64_t n, int64_t h,
                   int64_t begin, const Chunk& x, Floats& S) {
  const int64_t R = x.R, K = x.K, V = x.V;
  const Inner m = make_inner(p, x, S);
  Floats result(m.v_new.size(), 0.0f);
  const Floats v_operand = p.operands(m.v_new);
  multiply(m.qg.data(), m.S.data(), result.data(), R, K, V);
  for (float& y : result) y *= p.scale();
  multiply(m.Aqk.data(), v_operand.data(), result.data(), R, R, V);
  const int64_t token = p.first_token(n) + begin;
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      o.put(static_cast<size_t>(((token + i) * p.c.HV + h) * V + j),
            result[static_cast<size_t>(i * V + j)]);
    }
  }
  for (int64_t i = 1; i < R; ++i) {
    if (wants_checkpoint(p, n, begin + i)) {
      keep_checkpoints(p, out, n, h, begin + i, next_state(p, x, S, m.v_new, i));
    }
  }
  S = next_state(p, x, S, m.v_new, R);
}

// As a call hands a state of 16 bits on.
void round_state(const Problem& p, Floats& S) {
  if (!is_half(p.c.sdtype) || !(p.instance.has("initial_state") || p.instance.has("final_state") ||
                                p.c.pool != Pool::none)) {
    return;
  }
  for (float& s : S) s = round_to(s, p.c.sdtype);
}

// The recurrence over the tokens [first, end) of a sequence, of a value head; S before and after
// them.
void run_tokens(const Problem& p, const StateOutputs& out, const Output& o, const Output& record,
                int64_t n, int64_t h, int64_t first, Floats& S) {
  const Case& c = p.c;
  const int64_t K = c.K, V = c.V;
  Floats q(static_cast<size_t>(K)), k(q.size()), u(static_cast<size_t>(V)), result(u.size());
  std::vector<Floats> after;  // a tree's states, the first one that of no token
  if (c.tree) after.push_back(S);
  for (int64_t t = first; t < c.sequence_length(n); ++t) {
    if (c.tree) {
      const int64_t parent = p.parents[static_cast<size_t>(n * p.parent_columns() + t)];
      S = after[static_cast<size_t>(parent + 1)];
    }
    const int64_t token = p.first_token(n) + t, row = token * c.HV + h;
    p.load_row(p.q, token, p.k_head(h), q.data());
    p.load_row(p.k, token, p.k_head(h), k.data());
    std::fill(u.begin(), u.end(), 0.0f);
    for (int64_t d = 0; d < K; ++d) {
      const float decay =
          c.gate == Gate::none ? 1.0f : std::exp(std::max(kMinLogDecay, p.log_decay(row, h, d)));
      for (int64_t j = 0; j < V; ++j) {
        float& s = S[static_cast<size_t>(d * V + j)];
        s *= decay;
        if (c.gv) s *= std::exp(std::max(kMinLogDecay, p.gv[static_cast<size_t>(row * V + j)]));
        u[static_cast<size_t>(j)] += s * k[static_cast<size_t>(d)];
      }
    }
    for (int64_t j = 0; j < V; ++j) {
      float& y = u[static_cast<size_t>(j)];
      y = p.beta_at(row, j) * (p.v[static_cast<size_t>(row * V + j)] - y);
    }
    for (int64_t at = 0; at < c.record_width() && c.record; ++at) {
      const int64_t update = ((n * c.record_tokens() + t) * c.HV + h) * c.record_width() + at;
      const float x = at < K ? k[static_cast<size_t>(at)]
                      : at < K + V
                          ? u[static_cast<size_t>(at - K)]
                          : std::exp(std::max(kMinLogDecay, p.log_decay(row, h, at - K - V)));
      record.put(static_cast<size_t>(update), x);
    }
    std::fill(result.begin(), result.end(), 0.0f);
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t j = 0; j < V; ++j) {
        float& s = S[static_cast<size_t>(d * V + j)];
        s += k[static_cast<size_t>(d)] * u[static_cast<size_t>(j)];
        result[static_cast<size_t>(j)] += s * q[static_cast<size_t>(d)];
      }
    }
    for (int64_t j = 0; j < V; ++j) {
      o.put(static_cast<size_t>(row * V + j), p.scale() * result[static_cast<size_t>(j)]);
    }
    round_state(p, S);
    keep_checkpoints(p, out, n, h, t + 1, S);
    if (c.tree) after.push_back(S);
    if (const int64_t columns = p.instance.token_columns(); columns > 0) {
      const int64_t slot = p.instance.token_slots()[static_cast<size_t>(n * columns + t)];
      if (slot >= 0) StateOutputs::put(p, out.pool, slot, h, S);
    }
  }
}

// Tokens that run in chunks; the others come after them.
int64_t chunked_tokens(const Case& c, int64_t n) {
  if (c.listed_op() == Op::decode) return 0;
  return c.from.empty() ? c.sequence_length(n) : c.recurrent_from(n);
}

Values sequences(const Instance& instance) {
  const Problem p(instance);
  Values all;
  const Output o = make_output(instance, all, "o", 0.0);
  const Output record = make_output(instance, all, "record", 0.0);
  const StateOutputs out(instance, all);
  const int64_t work = p.c.num_sequences() * p.c.HV;
  const int64_t updates = p.c.record ? work * p.c.record_tokens() : 0;
  for (int64_t i = 0; i < updates; ++i) {  // without a token: decay 1
    for (int64_t d = p.c.K + p.c.V; d < p.c.record_width(); ++d)
      record.put(static_cast<size_t>(i * p.c.record_width() + d), 1.0f);
  }
#pragma omp parallel for schedule(dynamic) if (p.is_large())
  for (int64_t i = 0; i < work; ++i) {
    const int64_t n = i / p.c.HV, h = i % p.c.HV;
    if (p.is_skipped(n)) continue;
    const int64_t length = chunked_tokens(p.c, n);
    Floats S = first_state(p, n, h);
    keep_checkpoints(p, out, n, h, 0, S);
    for (int64_t begin = 0; begin < length; begin += p.c.chunk) {
      const int64_t rows = std::min<int64_t>(p.c.chunk, length - begin);
      const Chunk x = load_chunk(p, p.first_token(n) + begin, rows, h);
      forward_chunk(p, out, o, n, h, begin, x, S);
      keep_checkpoints(p, out, n, h, begin + rows, S);
    }
    if (!p.c.from.empty()) round_state(p, S);
    run_tokens(p, out, o, record, n, h, length, S);
    out.put_final(p, n, h, S);
  }
  return all;
}
}  // namespace

Values decode(const Instance& instance) { return sequences(instance); }

}  // namespace plain

Values plain_chunked(const Instance& instance) {
  const Case& c = instance.spec();
  switch (c.op) {
    case Op::forward:
    case Op::decode:
      return plain::sequences(instance);
    case Op::backward:
      return plain::backward(instance);
    case Op::conv:
      return c.gradient ? plain::conv_gradient(instance) : plain::conv(instance);
    case Op::rmsnorm:
      return plain::norm(instance);
    case Op::step:
      return plain::step(instance);
    case Op::move:
      return plain::move(instance);
    case Op::commit:
      return plain::commit(instance);
    default:
      return c.gradient ? plain::block_gradient(instance) : plain::block(instance);
  }
}

}  // namespace deltic::cases
