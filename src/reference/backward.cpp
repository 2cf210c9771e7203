// backward: the adjoint of the recurrence, token by token from the last to the first.
//
//     S'  = a_t S_{t-1} b_t          a_t = exp(log decay) per row of S, b_t = exp(gv) per column
//     e_t = v_t - S'^T k_t,          u_t = beta_t e_t
//     S_t = S' + k_t u_t^T
//     o_t = scale S_t^T q_t
//
// Every line above, read from below, gives the gradients of what stands on its right:
//
//     o:  dS_t += scale q do^T       dq = scale S_t do
//     S:  dS'   = dS_t               dk = dS_t u            du = dS_t^T k
//     u:  de    = beta du            dbeta = du e (summed over columns if it is one number)
//     e:  dv    = de                 dk -= S' de            dS' -= k de^T
//     S': dS_{t-1} = a dS' b         d(log a) = rowsum(S' dS'), d(log b) = columnsum(S' dS')
#include <omp.h>

#include <cmath>

#include "reference/operations.h"
#include "reference/token.h"

namespace deltic::reference {
namespace {

// The state before every token of one sequence and value head. All of them would be 0.5 GB for 4096
// tokens of 128 x 128, and every thread has its own: one in `stride` tokens is kept, and those of
// one stride at a time are computed from it by the same steps.
class History {
 public:
  History(const Problem& p, Scratch& scratch)
      : p_(p),
        stride_(std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(p.T))))),
        kept_(scratch, p.T / stride_ + 1, p.K * p.V),
        near_(scratch, stride_, p.K * p.V) {}

  void record(const Sequence& s, int64_t h, Token& token) {
    s_ = s, h_ = h, near_begin_ = -1;
    const Matrix S = state(near_, 0);
    load_state(p_.state_in, s.read_slot, h, S);
    for (int64_t t = 0; t < s.length; ++t) {
      if (t % stride_ == 0) copy(S, state(kept_, t / stride_));
      step(token, t, S);
    }
  }

  Matrix before(int64_t t, Token& token) {
    const int64_t begin = t / stride_ * stride_;
    if (begin != near_begin_) {
      copy(state(kept_, t / stride_), state(near_, 0));
      for (int64_t i = 1; i < stride_ && begin + i < s_.length; ++i) {
        copy(state(near_, i - 1), state(near_, i));
        step(token, begin + i - 1, state(near_, i));
      }
      near_begin_ = begin;
    }
    return state(near_, t - begin);
  }

 private:
  Matrix state(const Matrix& list, int64_t i) const {
    Matrix S;
    S.data = list.row(i), S.rows = p_.K, S.columns = p_.V;
    return S;
  }
  void step(Token& token, int64_t t, const Matrix& S) const {
    token.load(s_.batch, s_.begin + t, h_);
    token.step(S);
  }

  const Problem& p_;
  int64_t stride_;
  Matrix kept_, near_;  // of states
  Sequence s_;
  int64_t h_ = 0, near_begin_ = -1;
};

struct Memory {
  Memory(const Problem& p, std::byte* base)
      : scratch(base),
        history(p, scratch),
        token(p, scratch),
        S(scratch, p.K, p.V),
        dS(scratch, p.K, p.V),
        dq(scratch, p.T, p.K),
        dk(scratch, p.T, p.K) {
    for (double** x : {&d_o, &du, &de, &dbeta, &d_log_b}) *x = scratch.take<double>(p.V);
    for (double** x : {&d_log_a, &raw}) *x = scratch.take<double>(p.K);
  }
  Scratch scratch;
  History history;
  Token token;
  Matrix S, dS;
  Matrix dq, dk;  // of all tokens: the sums over the group
  double *d_o, *du, *de, *dbeta, *d_log_b, *d_log_a, *raw;
};

// The lines above for one token. dS is that of S_t, and becomes that of S_{t-1}.
void go_back(const Problem& p, const Matrix& before, double* dq, double* dk, Memory& m) {
  const int64_t K = p.K, V = p.V;
  const Matrix& dS = m.dS;
  Token& token = m.token;
  copy(before, m.S);
  token.step(m.S);
  // o
  add_outer(dS, p.scale, token.q, m.d_o);
  add_product(m.S, p.scale, m.d_o, dq);
  // S
  std::fill_n(m.du, V, 0.0);
  add_product(dS, 1, token.u, dk);
  add_transposed_product(dS, 1, token.k, m.du);
  // u
  for (int64_t c = 0; c < V; ++c) {
    m.de[c] = token.beta_t[c] * m.du[c];
    m.dbeta[c] = m.du[c] * token.e[c];
  }
  // e
  add_product(token.decayed, -1, m.de, dk);
  add_outer(dS, -1, token.k, m.de);
  // S'
  std::fill_n(m.d_log_b, V, 0.0);
  for (int64_t d = 0; d < K; ++d) {
    m.d_log_a[d] = dot(token.decayed.row(d), dS.row(d), V);
    for (int64_t c = 0; c < V; ++c) {
      m.d_log_b[c] += token.decayed(d, c) * dS(d, c);
      dS(d, c) *= token.decay[d] * token.value_decay[c];
    }
  }
}

void put_value_gradients(const Problem& p, const Sequence& s, int64_t t, int64_t h, Memory& m,
                         ParameterSums& sums) {
  const int64_t b = s.batch, row = s.begin + t;
  for (int64_t c = 0; c < p.V; ++c) {
    if (p.dv) put(p.dv, b, row, h, c, m.de[c]);
    if (p.dgv) put(p.dgv, b, row, h, c, m.d_log_b[c]);
  }
  if (p.dbeta) {
    for (int64_t c = 1; c < p.V && p.beta_kind == BetaKind::head; ++c) m.dbeta[0] += m.dbeta[c];
    for (int64_t c = 0; c < beta_width(p); ++c) {
      put(p.dbeta, b, row, h, c, beta_slope(p, get(p.beta, b, row, h, c)) * m.dbeta[c]);
    }
  }
  if (p.gate == Gate::none) return;
  for (int64_t d = 1; d < p.K && p.gate == Gate::head; ++d) m.d_log_a[0] += m.d_log_a[d];
  for (int64_t d = 0; d < gate_width(p); ++d) {
    put_gate_gradient(p, s, row, h, d, m.d_log_a[d], sums);
  }
}

// dq or dk of one token, through the norm. x is q or k.
void put_key_gradient(const Problem& p, const Rows& x, const Rows& dx, const Sequence& s, int64_t t,
                      int64_t h, double* gradient, double* raw) {
  if (!dx) return;
  for (int64_t d = 0; d < p.K; ++d) raw[d] = get(x, s.batch, s.begin + t, h, d);
  if (p.l2norm) normalize_gradient(raw, gradient, p.K);
  for (int64_t d = 0; d < p.K; ++d) put(dx, s.batch, s.begin + t, h, d, gradient[d]);
}

// One q/k head and the value heads that read it.
void run_group(const Problem& p, const Sequence& s, int64_t k_head, Memory& m,
               ParameterSums& sums) {
  std::fill_n(m.dq.data, s.length * p.K, 0.0);
  std::fill_n(m.dk.data, s.length * p.K, 0.0);
  const int64_t group = p.HV / p.H;
  for (int64_t h = k_head * group; h < (k_head + 1) * group; ++h) {
    m.history.record(s, h, m.token);
    load_state(p.d_final, s.n, h, m.dS);
    for (int64_t t = s.length - 1; t >= 0; --t) {
      const Matrix before = m.history.before(t, m.token);
      m.token.load(s.batch, s.begin + t, h);
      for (int64_t c = 0; c < p.V; ++c) {
        m.d_o[c] = p.d_o ? get(p.d_o, s.batch, s.begin + t, h, c) : 0;
      }
      go_back(p, before, m.dq.row(t), m.dk.row(t), m);
      put_value_gradients(p, s, t, h, m, sums);
    }
    if (p.d_initial) store_state(p.d_initial, s.n, h, m.dS);
  }
  for (int64_t t = 0; t < s.length; ++t) {
    put_key_gradient(p, p.q, p.dq, s, t, k_head, m.dq.row(t), m.raw);
    put_key_gradient(p, p.k, p.dk, s, t, k_head, m.dk.row(t), m.raw);
  }
}

}  // namespace

size_t backward_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  ParameterSums sums(p, scratch);
  const size_t memories = bytes_of_threads(p, p.N * p.H, Memory(p, nullptr).scratch.used());
  return static_cast<size_t>(checked_sum(scratch.used(), memories));
}

void run_backward(const Problem& p, std::byte* workspace) {
  Scratch scratch(workspace);
  ParameterSums sums(p, scratch);
  sums.clear();
  std::byte* memories = workspace + scratch.used();
  const size_t bytes = Memory(p, nullptr).scratch.used();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads(p, p.N* p.H))
  for (int64_t i = 0; i < p.N * p.H; ++i) {
    Memory memory(p, memories + static_cast<size_t>(omp_get_thread_num()) * bytes);
    run_group(p, sequence(p, i / p.H), i % p.H, memory, sums);
  }
  sums.put_totals();
  put_zero_padding(p, p.dq, p.H, p.K);
  put_zero_padding(p, p.dk, p.H, p.K);
  put_zero_padding(p, p.dv, p.HV, p.V);
  put_zero_padding(p, p.dbeta, p.HV, beta_width(p));
  put_zero_padding(p, p.dg, p.HV, gate_width(p));
  put_zero_padding(p, p.dgv, p.HV, p.V);
}

}  // namespace deltic::reference
