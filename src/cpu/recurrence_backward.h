// The backward pass of the recurrence, token by token, in fp32.
//
// Forward, for one sequence and value head (K x V state S, q and k after the L2 norm):
//
//     S'  = a_t S_{t-1} b_t          a_t = exp(log decay) per row of S, b_t = exp(gv) per column
//     e_t = v_t - S'^T k_t,          u_t = beta_t e_t     (beta_t may be one number per column)
//     S_t = S' + k_t u_t^T
//     o_t = scale S_t^T q_t
//
// Backward, from the last token to the first. dS starts as the gradient of the final state:
//
//     dS    += scale q_t do_t^T      now the gradient of S_t
//     dq_t   = scale S_t do_t
//     du     = dS^T k_t
//     dbeta  = du . e_t              per column: du e_t
//     dv_t   = beta_t du             the gradient of e_t as well
//     dk_t   = dS u_t - S' dv_t
//     dS'    = dS - k_t dv_t^T
//     dg     = rowsum(S' * dS')      of the log decay; summed over rows for one per head
//     dgv    = columnsum(S' * dS')
//     dS     = a_t dS' b_t           the gradient of S_{t-1}
//
// Memory: S at the starts of segments is kept, the states inside a segment are computed again. That
// changes no bit: they are the same operations on the same numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/problem.h"
#include "cpu/gradients.h"
#include "cpu/recurrence.h"

namespace deltic::recurrence_backward {

// Tokens of a segment. A task keeps T / length states for each of its value heads and `length`
// states of the segment it is in; this length makes both equal. Up to 64 tokens it is one segment,
// and nothing is computed twice.
inline int64_t segment_length(const Problem& p) {
  const auto states = static_cast<double>(p.T) * static_cast<double>(p.HV / p.H);
  return std::max<int64_t>(64, static_cast<int64_t>(std::ceil(std::sqrt(states))));
}

// What one thread needs for one sequence and q/k head, with the value heads of its group.
class Task {
 public:
  Task(const Problem& p, std::byte* base)
      : p_(p), group_(p.HV / p.H), length_(segment_length(p)), size_(p.K * p.V) {
    Scratch scratch(base);
    const int64_t tokens = std::min(length_, p.T);
    starts_ = scratch.take<float>(group_, (p.T + length_ - 1) / length_, size_);
    states_ = scratch.take<float>(tokens + 1, size_);
    e_ = scratch.take<float>(tokens, p.V);
    dS_ = scratch.take<float>(group_, size_);
    dq_ = scratch.take<float>(tokens, p.K);
    dk_ = scratch.take<float>(tokens, p.K);
    for (float** row : {&q_, &k_, &a_, &g_, &dg_}) *row = scratch.take<float>(p.K);
    for (float** row : {&v_, &d_o_, &u_, &du_, &b_, &beta_, &dbeta_, &dgv_}) {
      *row = scratch.take<float>(p.V);
    }
    bytes_ = scratch.used();
  }
  size_t bytes() const { return bytes_; }

  // sums: those of the sequence, [HV, parameter_sums_per_head].
  void run(const Sequence& s, int64_t key_head, double* sums) {
    const int64_t num_segments = (s.length + length_ - 1) / length_;
    const int64_t first_head = key_head * group_;
    for (int64_t i = 0; i < group_; ++i) {
      load_state(p_.state_in, s.n, first_head + i, states_);
      for (int64_t m = 0; m < num_segments; ++m) {
        std::copy_n(states_, size_, starts_ + (m * group_ + i) * size_);
        if (m + 1 == num_segments) break;
        for (int64_t t = m * length_; t < (m + 1) * length_; ++t) {
          load_inputs(s, t, first_head + i);
          advance(states_, states_, e_);
        }
      }
      load_state(p_.d_final, s.n, first_head + i, dS_ + i * size_);
    }
    for (int64_t m = num_segments - 1; m >= 0; --m) {
      const int64_t begin = m * length_, end = std::min(begin + length_, s.length);
      std::fill_n(dq_, (end - begin) * p_.K, 0.0f);
      std::fill_n(dk_, (end - begin) * p_.K, 0.0f);
      for (int64_t i = 0; i < group_; ++i) {
        const int64_t h = first_head + i;
        run_segment(s, h, begin, end, starts_ + (m * group_ + i) * size_, dS_ + i * size_,
                    sums + h * parameter_sums_per_head(p_));
      }
      for (int64_t t = begin; t < end; ++t) {
        store_key_gradient(p_.q, p_.dq, s, t, key_head, dq_ + (t - begin) * p_.K);
        store_key_gradient(p_.k, p_.dk, s, t, key_head, dk_ + (t - begin) * p_.K);
      }
    }
    for (int64_t i = 0; i < group_ && p_.d_initial; ++i) {
      store_state(p_.d_initial, s.n, first_head + i, dS_ + i * size_);
    }
  }

 private:
  void run_segment(const Sequence& s, int64_t h, int64_t begin, int64_t end, const float* start,
                   float* dS, double* sums) {
    std::copy_n(start, size_, states_);
    for (int64_t t = begin; t < end; ++t) {
      load_inputs(s, t, h);
      float* S = states_ + (t - begin) * size_;
      advance(S, S + size_, e_ + (t - begin) * p_.V);
    }
    for (int64_t t = end - 1; t >= begin; --t) {
      load_inputs(s, t, h);
      load_output_side(s, t, h);
      const int64_t row = t - begin;
      go_back(states_ + row * size_, e_ + row * p_.V, dS, dq_ + row * p_.K, dk_ + row * p_.K);
      store_gradients(s, t, h, sums);
    }
  }

  // S_{t-1} -> S_t, which may be the same memory, and e_t. Pointers are local here and in go_back:
  // through `this` g++ 12 makes scalar code, which took twice the time.
  void advance(const float* before, float* after, float* e) {
    const int64_t K = p_.K, V = p_.V;
    const float *k = k_, *a = a_, *b = b_, *beta = beta_;
    float* u = u_;
    std::copy_n(v_, V, e);
    for (int64_t d = 0; d < K; ++d) {
      const float* S_in = before + d * V;
      float* S = after + d * V;
      const float k_d = k[d], a_d = a[d];
#pragma omp simd
      for (int64_t c = 0; c < V; ++c) {
        S[c] = a_d * S_in[c] * b[c];
        e[c] -= k_d * S[c];
      }
    }
    for (int64_t c = 0; c < V; ++c) u[c] = beta[c] * e[c];
    for (int64_t d = 0; d < K; ++d) {
      float* S = after + d * V;
      const float k_d = k[d];
#pragma omp simd
      for (int64_t c = 0; c < V; ++c) S[c] += k_d * u[c];
    }
  }

  // One token backwards: dS of S_t -> of S_{t-1}. `before` is S_{t-1}, followed by S_t. Adds to dq
  // and dk; leaves dv in du, dbeta of each column, and the gradients of the log decays in dg and
  // dgv.
  void go_back(const float* before, const float* e, float* dS, float* dq, float* dk) {
    const int64_t K = p_.K, V = p_.V;
    const float* after = before + size_;
    const float *q = q_, *k = k_, *a = a_, *b = b_, *beta = beta_, *d_o = d_o_;
    float *u = u_, *du = du_, *dbeta = dbeta_;
    const float scale = p_.scale;
    std::fill_n(du, V, 0.0f);
    for (int64_t d = 0; d < K; ++d) {
      const float* S = after + d * V;
      float* dS_d = dS + d * V;
      const float k_d = k[d], q_d = scale * q[d];
      float dq_d = 0;
#pragma omp simd reduction(+ : dq_d)
      for (int64_t c = 0; c < V; ++c) {
        dS_d[c] += q_d * d_o[c];
        dq_d += S[c] * d_o[c];
        du[c] += k_d * dS_d[c];
      }
      dq[d] += scale * dq_d;
    }
    for (int64_t c = 0; c < V; ++c) {
      dbeta[c] = du[c] * e[c];
      du[c] *= beta[c];
      u[c] = beta[c] * e[c];
    }
    if (p_.dgv) column_decay_gradient(before, dS);
    for (int64_t d = 0; d < K; ++d) {
      const float* S = before + d * V;
      float* dS_d = dS + d * V;
      const float k_d = k[d], a_d = a[d];
      float dk_d = 0, dg_d = 0;
#pragma omp simd reduction(+ : dk_d, dg_d)
      for (int64_t c = 0; c < V; ++c) {
        const float decayed = S[c] * b[c];
        dk_d += dS_d[c] * u[c] - a_d * decayed * du[c];
        const float after_decay = dS_d[c] - k_d * du[c];
        dg_d += decayed * after_decay;
        dS_d[c] = a_d * after_decay * b[c];
      }
      dk[d] += dk_d;
      dg_[d] = a_d * dg_d;
    }
  }

  void column_decay_gradient(const float* before, const float* dS) {
    std::fill_n(dgv_, p_.V, 0.0f);
    for (int64_t d = 0; d < p_.K; ++d) {
      for (int64_t c = 0; c < p_.V; ++c) {
        const float after_decay = dS[d * p_.V + c] - k_[d] * du_[c];
        dgv_[c] += a_[d] * before[d * p_.V + c] * b_[c] * after_decay;
      }
    }
  }

  void load_inputs(const Sequence& s, int64_t t, int64_t h) {
    const int64_t b = s.batch, row = s.begin + t;
    load_row(p_.k, b, row, p_.k_head(h), 0, p_.K, k_);
    if (p_.l2norm) normalize(k_, p_.K);
    load_row(p_.v, b, row, h, 0, p_.V, v_);
    load_beta(p_, b, row, h, 0, p_.V, beta_);
    std::fill_n(b_, p_.V, 1.0f);
    if (p_.gv) {
      load_row(p_.gv, b, row, h, 0, p_.V, b_);
      for (int64_t c = 0; c < p_.V; ++c) b_[c] = std::exp(b_[c]);
    }
    std::fill_n(a_, p_.K, 1.0f);
    if (p_.gate == Gate::none) return;
    load_log_decay(p_, b, row, h, a_);
    // In fp32 exp is 0 below -104 without a clamp, and so is the gradient there.
    for (int64_t d = 0; d < gate_width(p_); ++d) a_[d] = std::exp(a_[d]);
    if (p_.gate == Gate::head) std::fill_n(a_, p_.K, a_[0]);
  }

  void load_output_side(const Sequence& s, int64_t t, int64_t h) {
    load_row(p_.q, s.batch, s.begin + t, p_.k_head(h), 0, p_.K, q_);
    if (p_.l2norm) normalize(q_, p_.K);
    std::fill_n(d_o_, p_.V, 0.0f);
    if (p_.d_o) load_row(p_.d_o, s.batch, s.begin + t, h, 0, p_.V, d_o_);
  }

  // Those of one value head: dv, and dbeta and dg down to the raw values.
  void store_gradients(const Sequence& s, int64_t t, int64_t h, double* sums) {
    const int64_t b = s.batch, row = s.begin + t;
    if (p_.dv) store_row(p_.dv, b, row, h, 0, p_.V, du_);
    if (p_.dbeta) {
      const int64_t width = beta_width(p_);
      if (width == 1) {
        for (int64_t c = 1; c < p_.V; ++c) dbeta_[0] += dbeta_[c];
      }
      load_row(p_.beta, b, row, h, 0, width, u_);
      for (int64_t c = 0; c < width; ++c) dbeta_[c] = beta_gradient(p_, u_[c], dbeta_[c]);
      store_row(p_.dbeta, b, row, h, 0, width, dbeta_);
    }
    if (p_.dgv) store_row(p_.dgv, b, row, h, 0, p_.V, dgv_);
    if (p_.gate == Gate::none) return;
    if (p_.gate == Gate::head) {
      for (int64_t d = 1; d < p_.K; ++d) dg_[0] += dg_[d];
    }
    if (p_.gate_form != DELTIC_GATE_LOG_DECAY) to_raw_gate(b, row, h, sums);
    if (p_.dg) store_row(p_.dg, b, row, h, 0, gate_width(p_), dg_);
  }

  void to_raw_gate(int64_t b, int64_t row, int64_t h, double* sums) {
    const int64_t width = gate_width(p_);
    load_row(p_.g, b, row, h, 0, width, g_);
    const GateRate rate = gate_rate(p_, h);
    for (int64_t d = 0; d < width; ++d) {
      const float bias = p_.dt_bias ? static_cast<float>(p_.dt_bias[h * width + d]) : 0.0f;
      const auto gradient = log_decay_gradient(p_, g_[d], rate, bias, dg_[d]);
      dg_[d] = gradient.g;
      if (!wants_parameter_sums(p_)) continue;
      sums[0] += gradient.A_log;
      sums[1 + d] += gradient.g;
    }
  }

  // dq or dk of one token, summed over the group: through the norm and out. x is q or k.
  void store_key_gradient(const Rows& x, const Rows& dx, const Sequence& s, int64_t t, int64_t h,
                          float* gradient) {
    if (!dx) return;
    if (p_.l2norm) {
      load_row(x, s.batch, s.begin + t, h, 0, p_.K, q_);
      const float r = reciprocal_norm(q_, p_.K);
      for (int64_t d = 0; d < p_.K; ++d) q_[d] *= r;
      normalize_gradient(q_, r, p_.K, gradient);
    }
    store_row(dx, s.batch, s.begin + t, h, 0, p_.K, gradient);
  }

  // K-first in scratch whatever the layout outside. An absent state is 0.
  void load_state(const States& x, int64_t slot, int64_t h, float* S) const {
    if (!x) std::fill_n(S, size_, 0.0f);
    for (int64_t d = 0; d < p_.K && x; ++d) {
      load_elements(x.data, x.dtype, x.at(slot, h) + d * x.s_k, x.s_v, p_.V, S + d * p_.V);
    }
  }
  void store_state(const States& x, int64_t slot, int64_t h, const float* S) const {
    for (int64_t d = 0; d < p_.K; ++d) {
      store_elements(x.data, x.dtype, x.at(slot, h) + d * x.s_k, x.s_v, p_.V, S + d * p_.V);
    }
  }

  const Problem& p_;
  int64_t group_, length_, size_;  // value heads, tokens of a segment, numbers of a state
  float *starts_, *states_, *e_, *dS_, *dq_, *dk_;
  float *q_, *k_, *a_, *g_, *dg_;                            // of one token: [K]
  float *v_, *d_o_, *u_, *du_, *b_, *beta_, *dbeta_, *dgv_;  // [V]
  size_t bytes_;
};

inline int64_t num_tasks(const Problem& p) { return has_tokens_or_states(p) ? p.N * p.H : 0; }
inline int num_threads(const Problem& p) { return recurrence_threads(p, num_tasks(p)); }

// The sums of the parameters, then a task's memory for every thread.
inline size_t sums_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  scratch.take<double>(num_parameter_sums(p));
  return scratch.used();
}

inline size_t workspace_bytes(const Problem& p) {
  if (num_tasks(p) == 0) return sums_bytes(p);
  return static_cast<size_t>(
      checked_sum(sums_bytes(p), checked_product(Task(p, nullptr).bytes(), num_threads(p))));
}

inline void run(const Problem& p, std::span<std::byte> workspace) {
  auto* sums = reinterpret_cast<double*>(workspace.data());
  std::fill_n(sums, num_parameter_sums(p), 0.0);
  std::byte* tasks = workspace.data() + sums_bytes(p);
  const size_t bytes = Task(p, nullptr).bytes();
  cpu::run_team(num_threads(p), [&](const cpu::Member& member) {
    member.for_each(num_tasks(p), [&](int64_t i) {
      Task task(p, tasks + static_cast<size_t>(member.index) * bytes);
      const int64_t n = i / p.H;
      task.run(sequence(p, n), i % p.H, sums + n * p.HV * parameter_sums_per_head(p));
    });
  });
  store_parameter_gradients(p, sums);
  zero_gradient_padding(p);
}

}  // namespace deltic::recurrence_backward
