// The plain algorithm: the textbook chunked form in fp32 with rounded operands, one function per
// operation. It is a measure of what a straightforward implementation loses, so it has no tricks
// and no blocks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "scalar.h"

namespace deltic::cases {
namespace {

using Floats = std::vector<float>;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }
constexpr float kMinLogDecay = -104.0f;
constexpr float kNormEps = 1e-6f;

// The inputs as fp32, and where things are.
struct Problem {
  const Instance& instance;
  const Case& c;
  Floats q, k, v, beta, g, gv, A_log, dt_bias, state, a, x;
  std::vector<int64_t> ckpt_cu, ckpt_tokens, ckpt_slots, token_slots;
  int64_t index_columns = 0;

  explicit Problem(const Instance& i) : instance(i), c(i.spec()) {
    q = floats("q"), k = floats("k"), v = floats("v"), beta = floats("beta"), g = floats("g");
    gv = floats("gv"), A_log = floats("A_log"), dt_bias = floats("dt_bias");
    a = floats("a"), x = floats("x");
    ckpt_cu = whole("ckpt_cu"), ckpt_tokens = whole("ckpt_tokens"),
    ckpt_slots = whole("ckpt_slots");
    if (c.pool == Pool::tokens) {
      token_slots = whole("write_index");
      index_columns = i.tensor("write_index").view.shape[1];
    }
    if (c.init || c.pool != Pool::none) {  // values before any run
      const Tensor& t = i.tensor(c.init ? "initial_state" : "state_pool");
      state = first_values(t);
    }
  }
  Floats floats(const char* name) const {
    if (!instance.has(name)) return {};
    const std::vector<double> d = instance.values(name);
    return Floats(d.begin(), d.end());
  }
  std::vector<int64_t> whole(const char* name) const {
    if (!instance.has(name)) return {};
    const std::vector<double> d = instance.values(name);
    return std::vector<int64_t>(d.begin(), d.end());
  }
  static Floats first_values(const Tensor& t) {
    const auto shift = static_cast<const std::byte*>(t.view.data) - t.buffer.data();
    Floats list(static_cast<size_t>(t.view.numel()));
    for (size_t i = 0; i < list.size(); ++i) {
      int64_t rest = static_cast<int64_t>(i), offset = 0;
      for (int32_t d = t.view.rank - 1; d >= 0; --d) {
        offset += (rest % t.view.shape[d]) * t.view.strides[d];
        rest /= t.view.shape[d];
      }
      list[i] = static_cast<float>(
          load(t.before.data() + shift, static_cast<DType>(t.view.dtype), offset));
    }
    return list;
  }

  // Worth more than one thread: about ten milliseconds.
  bool is_large() const { return c.num_real_tokens() * c.HV * c.K * c.V > 1 << 22; }
  int64_t first_token(int64_t n) const { return c.packed ? c.sequence_begin(n) : n * c.length; }
  int64_t k_head(int64_t h) const { return h / (c.HV / c.H); }
  float scale() const {
    return c.scale ? static_cast<float>(*c.scale)
                   : static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.K)));
  }
  // Operands of a product; those that carry an exponential leave fp16's range, so they go to bf16.
  float operand(float y) const { return round_to(y, c.dtype); }
  float exp_operand(float y) const {
    return round_to(y, c.dtype == DType::f16 ? DType::bf16 : c.dtype);
  }

  float log_decay(int64_t row, int64_t h, int64_t d) const {  // unclamped
    const bool by_channel = c.gate == Gate::channel;
    const float raw = g[static_cast<size_t>(by_channel ? row * c.K + d : row)];
    if (c.form == GateForm::log_decay) return raw;
    const float bias =
        dt_bias.empty() ? 0.0f : dt_bias[static_cast<size_t>(by_channel ? h * c.K + d : h)];
    const float A = A_log.empty() ? 1.0f : std::exp(A_log[static_cast<size_t>(h)]);
    if (c.form == GateForm::softplus) return -A * softplus(raw + bias);
    return static_cast<float>(c.lower_bound) * sigmoid(A * (raw + bias));
  }
  float beta_at(int64_t row, int64_t column = 0) const {
    if (beta.empty()) return 1.0f;
    const float b = beta[static_cast<size_t>(c.betavec ? row * c.V + column : row)];
    return c.beta == Beta::sigmoid ? sigmoid(b) : c.beta == Beta::two_sigmoid ? 2 * sigmoid(b) : b;
  }
  // One row of q or k, normalised if the case asks for it.
  void load_row(const Floats& from, int64_t token, int64_t head, float* to) const {
    const float* row = from.data() + (token * c.H + head) * c.K;
    float factor = 1.0f;
    if (c.l2norm) {
      float sum = 0;
      for (int64_t d = 0; d < c.K; ++d) sum += row[d] * row[d];
      factor = 1.0f / std::sqrt(sum + kNormEps);
    }
    for (int64_t d = 0; d < c.K; ++d) to[d] = row[d] * factor;
  }
  // Element (d, column) of a state in the case's layout.
  size_t state_at(int64_t slot, int64_t h, int64_t d, int64_t column) const {
    const int64_t base = (slot * c.HV + h) * c.K * c.V;
    return static_cast<size_t>(base +
                               (c.state == StateLayout::vk ? column * c.K + d : d * c.V + column));
  }
  int64_t read_slot(int64_t n) const {
    return c.pool != Pool::none ? instance.read_slots()[static_cast<size_t>(n)] : c.init ? n : -1;
  }
  bool is_skipped(int64_t n) const {
    return c.pool != Pool::none && c.pool != Pool::tokens && read_slot(n) < 0 &&
           instance.write_slots()[static_cast<size_t>(n)] < 0;
  }
};

struct Output {
  std::vector<double>* values = nullptr;
  DType dtype = DType::f32;
  void put(size_t i, float y) const {
    if (values != nullptr) (*values)[i] = round_to(y, dtype);
  }
};

Output make_output(const Instance& instance, Values& all, const char* name, double start) {
  if (!instance.has(name)) return {};
  const Tensor& t = instance.tensor(name);
  if (t.role == Role::input) return {};
  std::vector<double>& list = all[name];
  list.assign(static_cast<size_t>(t.view.numel()), start);
  return {&list, static_cast<DType>(t.view.dtype)};
}

// States of one call: final state or pool, and checkpoints.
struct StateOutputs {
  Output final_state, pool, ckpt;
  StateOutputs(const Instance& i, Values& all)
      : final_state(make_output(i, all, "final_state", NAN)),
        pool(make_output(i, all, "state_pool", NAN)),
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
    if (p.c.pool == Pool::none || p.c.pool == Pool::tokens) return;
    const int64_t slot = p.instance.write_slots()[static_cast<size_t>(n)];
    if (slot >= 0) put(p, pool, slot, h, S);
  }
};

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

void keep_checkpoints(const Problem& p, const StateOutputs& out, int64_t n, int64_t h,
                      int64_t token, const Floats& S) {
  if (p.ckpt_cu.empty()) return;
  for (int64_t m = p.ckpt_cu[static_cast<size_t>(n)]; m < p.ckpt_cu[static_cast<size_t>(n + 1)];
       ++m) {
    const auto i = static_cast<size_t>(m);
    if (p.ckpt_tokens[i] == token && p.ckpt_slots[i] >= 0) {
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

// One chunk of one sequence and value head, rows 0..R-1, with everything in local row-major arrays.
struct Chunk {
  int64_t R, K, V;
  Floats q, k, v, beta, G;  // [R,K] [R,K] [R,V] [R] [R,K]
};

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

// sum_d a_id b_jd exp(G_id - G_jd) for two left sides at once; per head the exponential stays
// outside.
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

// (I + L)^-1 of the first R rows, by forward substitution; L has W columns.
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

// C[i, n] += sum_m A[i, m] B[m, n]
void multiply(const float* A, const float* B, float* C, int64_t I, int64_t M, int64_t N) {
  for (int64_t i = 0; i < I; ++i) {
    for (int64_t m = 0; m < M; ++m) {
      const float a = A[i * M + m];
      for (int64_t n = 0; n < N; ++n) C[i * N + n] += a * B[m * N + n];
    }
  }
}

// S <- exp(G_last) S + (k exp(G_last - G))^T v_new over the first `rows` rows.
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

void forward_chunk(const Problem& p, const StateOutputs& out, const Output& o, int64_t n, int64_t h,
                   int64_t begin, const Chunk& x, Floats& S) {
  const int64_t R = x.R, K = x.K, V = x.V;
  const float scale = p.scale();
  Floats L(static_cast<size_t>(R * R), 0.0f), Aqk(L.size(), 0.0f);
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      float kk = 0, qk = 0;
      gated_products(p, x.k.data() + i * K, x.q.data() + i * K, x.k.data() + j * K,
                     x.G.data() + i * K, x.G.data() + j * K, K, kk, qk);
      if (j < i) L[static_cast<size_t>(i * R + j)] = x.beta[static_cast<size_t>(i)] * kk;
      Aqk[static_cast<size_t>(i * R + j)] = p.operand(scale * qk);
    }
  }
  Floats A = invert(L, R, R);
  for (float& y : A) y = p.operand(y);
  Floats bv(static_cast<size_t>(R * V)), bk(static_cast<size_t>(R * K)), qg(bk.size());
  for (int64_t i = 0; i < R; ++i) {
    const float b = x.beta[static_cast<size_t>(i)];
    for (int64_t j = 0; j < V; ++j) {
      bv[static_cast<size_t>(i * V + j)] = p.operand(b * x.v[static_cast<size_t>(i * V + j)]);
    }
    for (int64_t d = 0; d < K; ++d) {
      const auto at = static_cast<size_t>(i * K + d);
      const float e = std::exp(x.G[at]);
      bk[at] = p.exp_operand(b * x.k[at] * e);
      qg[at] = p.exp_operand(x.q[at] * e);
    }
  }
  Floats v_new(bv.size(), 0.0f), w(bk.size(), 0.0f), S_operand(S), ws(bv.size(), 0.0f);
  multiply(A.data(), bv.data(), v_new.data(), R, R, V);
  multiply(A.data(), bk.data(), w.data(), R, R, K);
  for (float& y : w) y = p.operand(y);
  for (float& y : S_operand) y = p.operand(y);
  multiply(w.data(), S_operand.data(), ws.data(), R, K, V);
  for (size_t i = 0; i < v_new.size(); ++i) v_new[i] -= ws[i];

  Floats result(bv.size(), 0.0f), v_operand(v_new);
  multiply(qg.data(), S_operand.data(), result.data(), R, K, V);
  for (float& y : result) y *= scale;
  for (float& y : v_operand) y = p.operand(y);
  multiply(Aqk.data(), v_operand.data(), result.data(), R, R, V);
  const int64_t token = p.first_token(n) + begin;
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      o.put(static_cast<size_t>(((token + i) * p.c.HV + h) * V + j),
            result[static_cast<size_t>(i * V + j)]);
    }
  }
  for (int64_t i = 1; i < R; ++i) {
    if (wants_checkpoint(p, n, begin + i)) {
      keep_checkpoints(p, out, n, h, begin + i, next_state(p, x, S, v_new, i));
    }
  }
  S = next_state(p, x, S, v_new, R);
}

Values plain_forward(const Instance& instance) {
  const Problem p(instance);
  Values all;
  const Output o = make_output(instance, all, "o", 0.0);
  const StateOutputs out(instance, all);
  const int64_t work = p.c.num_sequences() * p.c.HV;
#pragma omp parallel for schedule(dynamic) if (p.is_large())
  for (int64_t i = 0; i < work; ++i) {
    const int64_t n = i / p.c.HV, h = i % p.c.HV;
    if (p.is_skipped(n)) continue;
    const int64_t length = p.c.sequence_length(n);
    Floats S = first_state(p, n, h);
    keep_checkpoints(p, out, n, h, 0, S);
    for (int64_t begin = 0; begin < length; begin += p.c.chunk) {
      const int64_t rows = std::min<int64_t>(p.c.chunk, length - begin);
      const Chunk x = load_chunk(p, p.first_token(n) + begin, rows, h);
      forward_chunk(p, out, o, n, h, begin, x, S);
      keep_checkpoints(p, out, n, h, begin + rows, S);
    }
    out.put_final(p, n, h, S);
  }
  return all;
}

Values plain_decode(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  Values all;
  const Output o = make_output(instance, all, "o", 0.0);
  const StateOutputs out(instance, all);
  const int64_t K = c.K, V = c.V;
#pragma omp parallel for schedule(dynamic) if (p.is_large())
  for (int64_t i = 0; i < c.num_sequences() * c.HV; ++i) {
    const int64_t n = i / c.HV, h = i % c.HV;
    if (p.is_skipped(n)) continue;
    Floats S = first_state(p, n, h), q(static_cast<size_t>(K)), k(q.size());
    Floats u(static_cast<size_t>(V)), result(u.size());
    keep_checkpoints(p, out, n, h, 0, S);
    for (int64_t t = 0; t < c.sequence_length(n); ++t) {
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
      keep_checkpoints(p, out, n, h, t + 1, S);
      if (c.pool == Pool::tokens) {
        const int64_t slot = p.token_slots[static_cast<size_t>(n * p.index_columns + t)];
        if (slot >= 0) StateOutputs::put(p, out.pool, slot, h, S);
      }
    }
    out.put_final(p, n, h, S);
  }
  return all;
}

// ---- Building blocks ------------------------------------------------------------------------

// Calls f(first token of the chunk, its rows, value head) for every chunk.
template <class F>
void for_each_chunk(const Problem& p, const F& f) {
  for (int64_t n = 0; n < p.c.num_sequences(); ++n) {
    for (int64_t begin = 0; begin < p.c.sequence_length(n); begin += p.c.chunk) {
      const int64_t rows = std::min<int64_t>(p.c.chunk, p.c.sequence_length(n) - begin);
      for (int64_t h = 0; h < p.c.HV; ++h) f(p.first_token(n) + begin, rows, h);
    }
  }
}

void block_gates(const Problem& p, const Output& out) {
  const Case& c = p.c;
  const int64_t width = c.gate == Gate::channel ? c.K : 1;
  const float scale = c.scale ? static_cast<float>(*c.scale) : 1.0f;
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    for (int64_t d = 0; d < width; ++d) {
      float sum = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (token + (c.reverse ? rows - 1 - r : r)) * c.HV + h;
        const float y = p.log_decay(row, h, d);
        sum += std::max(kMinLogDecay, y);
        out.put(static_cast<size_t>(row * width + d), c.op == Op::gate ? y : scale * sum);
      }
    }
  });
}

void block_l2norm(const Problem& p, const Output& out, const Output& rstd) {
  const Case& c = p.c;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t r = p.first_token(n) * c.H; r < (p.first_token(n) + c.sequence_length(n)) * c.H;
         ++r) {
      const float* x = p.x.data() + r * c.K;
      float sum = 0;
      for (int64_t d = 0; d < c.K; ++d) sum += x[d] * x[d];
      const float factor = 1.0f / std::sqrt(sum + kNormEps);
      for (int64_t d = 0; d < c.K; ++d) out.put(static_cast<size_t>(r * c.K + d), x[d] * factor);
      rstd.put(static_cast<size_t>(r), factor);
    }
  }
}

// exp of G at (row, d), or of a difference of two rows.
float gate_at(const Problem& p, int64_t row, int64_t d) {
  if (p.c.gate == Gate::none) return 0.0f;
  return p.g[static_cast<size_t>(p.c.gate == Gate::channel ? row * p.c.K + d : row)];
}

void block_products(const Problem& p, const Output& out) {  // kkt, scores
  const Case& c = p.c;
  const bool is_kkt = c.op == Op::kkt;
  Floats Gi(static_cast<size_t>(c.K)), Gj(Gi.size());
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (token + i) * c.HV + h;
      const float* left = (is_kkt ? p.k : p.q).data() + ((token + i) * c.H + p.k_head(h)) * c.K;
      for (int64_t j = 0; j < (is_kkt ? i : i + 1); ++j) {
        const float* right = p.k.data() + ((token + j) * c.H + p.k_head(h)) * c.K;
        for (int64_t d = 0; d < c.K; ++d) {
          Gi[static_cast<size_t>(d)] = gate_at(p, row, d);
          Gj[static_cast<size_t>(d)] = gate_at(p, (token + j) * c.HV + h, d);
        }
        float sum = 0, same = 0;
        gated_products(p, left, left, right, Gi.data(), Gj.data(), c.K, sum, same);
        out.put(static_cast<size_t>(row * c.chunk + j),
                (is_kkt ? p.beta_at(row) : p.scale()) * sum);
      }
    }
  });
}

void block_inverse(const Problem& p, const Output& out) {
  const int64_t W = p.c.chunk;
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    Floats L(static_cast<size_t>(rows * W), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(p.a.data() + ((token + i) * p.c.HV + h) * W, i, L.data() + i * W);
    }
    const Floats A = invert(L, rows, W);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < W; ++j) {
        out.put(static_cast<size_t>(((token + i) * p.c.HV + h) * W + j),
                A[static_cast<size_t>(i * W + j)]);
      }
    }
  });
}

void block_wy(const Problem& p, const Instance& instance, Values& all) {
  const Case& c = p.c;
  const Output w = make_output(instance, all, "w", 0.0), u = make_output(instance, all, "u", 0.0);
  const Output kg = make_output(instance, all, "kg", 0.0),
               qg = make_output(instance, all, "qg", 0.0);
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    const int64_t last = (token + rows - 1) * c.HV + h;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (token + i) * c.HV + h;
      const auto k_at = [&](int64_t t, int64_t d) {
        return static_cast<size_t>((t * c.H + p.k_head(h)) * c.K + d);
      };
      for (int64_t d = 0; d < c.K; ++d) {
        float sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t other = (token + j) * c.HV + h;
          sum += p.operand(p.a[static_cast<size_t>(row * c.chunk + j)]) *
                 p.exp_operand(p.beta_at(other) * p.k[k_at(token + j, d)] *
                               std::exp(gate_at(p, other, d)));
        }
        const auto at = static_cast<size_t>(row * c.K + d);
        w.put(at, sum);
        kg.put(at, p.k[k_at(token + i, d)] * std::exp(gate_at(p, last, d) - gate_at(p, row, d)));
        if (c.qg) qg.put(at, p.q[k_at(token + i, d)] * std::exp(gate_at(p, row, d)));
      }
      for (int64_t d = 0; c.u && d < c.V; ++d) {
        float sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t other = (token + j) * c.HV + h;
          sum += p.operand(p.a[static_cast<size_t>(row * c.chunk + j)]) *
                 p.operand(p.beta_at(other) * p.v[static_cast<size_t>(other * c.V + d)]);
        }
        u.put(static_cast<size_t>(row * c.V + d), sum);
      }
    }
  });
}

}  // namespace

Values plain_chunked(const Instance& instance) {
  const Op op = instance.spec().op;
  if (op == Op::forward) return plain_forward(instance);
  if (op == Op::decode) return plain_decode(instance);
  const Problem p(instance);
  Values all;
  if (op == Op::wy) {
    block_wy(p, instance, all);
    return all;
  }
  const Output out = make_output(instance, all, "out", 0.0);
  if (op == Op::cumsum || op == Op::gate) block_gates(p, out);
  if (op == Op::l2norm) block_l2norm(p, out, make_output(instance, all, "rstd", 0.0));
  if (op == Op::kkt || op == Op::scores) block_products(p, out);
  if (op == Op::inverse) block_inverse(p, out);
  return all;
}

}  // namespace deltic::cases
