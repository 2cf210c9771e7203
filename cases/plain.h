// What the plain algorithms of all operations share: the inputs as fp32, chunks, products.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cases/check.h"
#include "cases/scalar.h"

namespace deltic::cases::plain {

using Floats = std::vector<float>;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }
inline constexpr float kMinLogDecay = -104.0f;
inline constexpr float kNormEps = 1e-6f;

// The inputs as fp32, and where things are.
struct Problem {
  const Instance& instance;
  const Case& c;
  Floats q, k, v, beta, g, gv, A_log, dt_bias, state, a, x, d_o, d_final;
  std::vector<int64_t> ckpt_cu, ckpt_tokens, ckpt_slots, has_initial, parents;

  explicit Problem(const Instance& i) : instance(i), c(i.spec()) {
    q = floats("q"), k = floats("k"), v = floats("v"), beta = floats("beta"), g = floats("g");
    gv = floats("gv"), A_log = floats("A_log"), dt_bias = floats("dt_bias");
    a = floats("a"), x = floats("x");
    d_o = floats("d_o"), d_final = floats("d_final_state");
    ckpt_cu = whole("ckpt_cu"), ckpt_tokens = whole("ckpt_tokens"),
    ckpt_slots = whole("ckpt_slots"), has_initial = whole("has_initial_state");
    parents = whole("parents");
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

  int64_t parent_columns() const { return instance.tensor("parents").view.shape[1]; }
  // Worth more than one thread: about ten milliseconds.
  int64_t gate_width() const { return c.gate == Gate::channel ? c.K : 1; }
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
  Floats operands(Floats list) const {
    for (float& y : list) y = operand(y);
    return list;
  }

  // What a gate form is applied to: A = exp(A_log), x = g + dt_bias.
  struct RawGate {
    float A, x;
  };
  RawGate raw_gate(int64_t row, int64_t h, int64_t d) const {
    const bool by_channel = c.gate == Gate::channel;
    const float raw = g[static_cast<size_t>(by_channel ? row * c.K + d : row)];
    const float bias =
        dt_bias.empty() ? 0.0f : dt_bias[static_cast<size_t>(by_channel ? h * c.K + d : h)];
    return {A_log.empty() ? 1.0f : std::exp(A_log[static_cast<size_t>(h)]), raw + bias};
  }
  float log_decay(int64_t row, int64_t h, int64_t d) const {  // unclamped
    const RawGate r = raw_gate(row, h, d);
    if (c.form == GateForm::log_decay) return r.x;
    if (c.form == GateForm::softplus) return -r.A * softplus(r.x);
    return static_cast<float>(c.lower_bound) * sigmoid(r.A * r.x);
  }
  float beta_at(int64_t row, int64_t column = 0) const {
    if (beta.empty()) return 1.0f;
    const float b = beta[static_cast<size_t>(c.betavec ? row * c.V + column : row)];
    return c.beta == Beta::sigmoid ? sigmoid(b) : c.beta == Beta::two_sigmoid ? 2 * sigmoid(b) : b;
  }
  // One row of q or k, normalised if the case asks for it; returns the norm's factor.
  float load_row(const Floats& from, int64_t token, int64_t head, float* to) const {
    const float* row = from.data() + (token * c.H + head) * c.K;
    float factor = 1.0f;
    if (c.l2norm) {
      float sum = 0;
      for (int64_t d = 0; d < c.K; ++d) sum += row[d] * row[d];
      factor = 1.0f / std::sqrt(sum + kNormEps);
    }
    for (int64_t d = 0; d < c.K; ++d) to[d] = row[d] * factor;
    return factor;
  }
  // Element (d, column) of a state in the case's layout.
  size_t state_at(int64_t slot, int64_t h, int64_t d, int64_t column) const {
    const int64_t base = (slot * c.HV + h) * c.K * c.V;
    return static_cast<size_t>(base +
                               (c.state == StateLayout::vk ? column * c.K + d : d * c.V + column));
  }
  int64_t read_slot(int64_t n) const {
    if (!has_initial.empty() && has_initial[static_cast<size_t>(n)] == 0) return -1;
    return c.pool != Pool::none ? instance.read_slots()[static_cast<size_t>(n)] : c.init ? n : -1;
  }
  bool is_skipped(int64_t n) const { return c.pool != Pool::none && instance.is_skipped(n); }
};

struct Output {
  std::vector<double>* values = nullptr;
  DType dtype = DType::f32;
  void put(size_t i, float y) const {
    if (values != nullptr) (*values)[i] = round_to(y, dtype);
  }
};
// An output of the call, filled with `start`; one that the call has not takes nothing.
Output make_output(const Instance& instance, Values& all, const char* name, double start);

// One chunk of one sequence and value head, rows 0..R-1, with everything in local row-major arrays.
struct Chunk {
  int64_t R, K, V;
  Floats q, k, v, beta, G;  // [R,K] [R,K] [R,V] [R] [R,K]
};
Chunk load_chunk(const Problem& p, int64_t token, int64_t rows, int64_t h);

// What is between a chunk's inputs and outputs, from the state before it. Factors of products are
// rounded to the operand type.
struct Inner {
  Floats kk;          // [R,R] sum_d k_id k_jd exp(G_id - G_jd) below the diagonal, fp32
  Floats A;           // [R,R] (I + beta kk)^-1
  Floats Aqk;         // [R,R] with the scale
  Floats bv, bk, qg;  // beta v, beta k exp(G), q exp(G)
  Floats w, S;        // A bk, the state
  Floats v_new;       // A bv - w S, fp32
};
Inner make_inner(const Problem& p, const Chunk& x, const Floats& S);

// sum_d a_id k_jd exp(G_id - G_jd) for two left sides at once; per head the exponential stays
// outside.
void gated_products(const Problem& p, const float* ai, const float* bi, const float* kj,
                    const float* Gi, const float* Gj, int64_t K, float& with_a, float& with_b);
// (I + L)^-1 of the first R rows, by forward substitution; L has W columns.
Floats invert(const Floats& L, int64_t R, int64_t W);
// C[i, n] += sum_m A[i, m] B[m, n]
void multiply(const float* A, const float* B, float* C, int64_t I, int64_t M, int64_t N);

Floats first_state(const Problem& p, int64_t n, int64_t h);
// S <- exp(G_last) S + (k exp(G_last - G))^T v_new over the first `rows` rows.
Floats next_state(const Problem& p, const Chunk& x, const Floats& S, const Floats& v_new,
                  int64_t rows);

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
// The cumulative log decay that a building block is given.
inline float gate_at(const Problem& p, int64_t row, int64_t d) {
  if (p.c.gate == Gate::none) return 0.0f;
  return p.g[static_cast<size_t>(p.c.gate == Gate::channel ? row * p.c.K + d : row)];
}

// A[I, M] B[N, M]^T
Floats times_transposed(const Floats& A, const Floats& B, int64_t I, int64_t M, int64_t N);
// A[I, M]^T B[I, N]
Floats transposed_times(const Floats& A, const Floats& B, int64_t I, int64_t M, int64_t N);

struct ChunkGradient {
  Floats dq, dk, dG;  // [R,K]: of the normalised rows, of the cumulative log decay
  Floats dv, dbeta;   // [R,V] [R]
};
// The part of dq, dk and dG that comes from dP = d(Aqk) / scale and dL inside the chunk. A product
// with exp(G_i - G_i) does not depend on G: the diagonal is left out of dG.
void add_inner_scores(const Problem& p, const Chunk& x, const Floats& dP, const Floats& dL,
                      ChunkGradient& r);

// Sums over the group and the tokens of what the value heads give, in fp32.
struct Sums {
  Floats dq, dk;            // [B,T,H,K], of the normalised rows
  Floats dA_log, ddt_bias;  // [HV] [HV, width]
  explicit Sums(const Problem& p);
  // Adds a chunk's rows of dq and dk to those of its key head.
  void add_rows(const Problem& p, int64_t token, int64_t h, const ChunkGradient& r);
};
// d(log decay) of one element -> dg, and its part of dA_log and ddt_bias.
void put_gate(const Problem& p, const Output& dg, Sums& sums, int64_t row, int64_t h, int64_t d,
              float dy);
void put_parameters(const Instance& instance, Values& all, const Sums& sums);

Values backward(const Instance& instance);
Values block(const Instance& instance);
Values block_gradient(const Instance& instance);
Values norm(const Instance& instance);
Values move(const Instance& instance);
Values commit(const Instance& instance);
Values conv(const Instance& instance);
Values decode(const Instance& instance);
Values step(const Instance& instance);
Values conv_gradient(const Instance& instance);

}  // namespace deltic::cases::plain
