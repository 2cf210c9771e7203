// The edges of a pass over tokens in fp32: scratch, rows in and out, gate and beta forms, the L2
// norm, and where the states of a sequence come from and go to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/problem.h"
#include "core/random.h"
#include "core/scratch.h"
#include "cpu/team.h"

namespace deltic {

// Threads for a recurrence in `tasks` pieces: about 1 ns for a token and a number of its state.
inline int recurrence_threads(const Problem& p, int64_t tasks) {
  const double numbers = std::max(cpu::token_heads(p), static_cast<double>(p.N * p.HV)) *
                         static_cast<double>(p.K) * static_cast<double>(p.V);
  const auto pieces = static_cast<double>(std::max<int64_t>(tasks, 1));
  return cpu::useful_threads(p, pieces, numbers / pieces);
}

// ---- Rows ----
// `count` elements, `stride` apart, from element `at` on. Stores round to nearest even.

inline void load_elements(const void* data, DType type, int64_t at, int64_t stride, int64_t count,
                          float* out) {
  const auto convert = [&](const auto* in, auto to_float) {
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(to_float(in[at + i]));
    } else {
      for (int64_t i = 0; i < count; ++i)
        out[i] = static_cast<float>(to_float(in[at + i * stride]));
    }
  };
  const auto as_is = [](auto x) { return x; };
  switch (type) {
    case DType::f32:
      return convert(static_cast<const float*>(data), as_is);
    case DType::bf16:
      return convert(static_cast<const uint16_t*>(data), bf16_to_f32);
    case DType::f16:
      return convert(static_cast<const uint16_t*>(data), f16_to_f32);
    default:
      return convert(static_cast<const double*>(data), as_is);
  }
}

inline void store_elements(void* data, DType type, int64_t at, int64_t stride, int64_t count,
                           const float* in) {
  if (type == DType::f32) {  // the usual state, worth a loop without a switch
    float* out = static_cast<float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i * stride] = in[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) store(data, type, at + i * stride, in[i]);
}

inline void load_row(const Rows& x, int64_t b, int64_t t, int64_t h, int64_t first, int64_t count,
                     float* out) {
  load_elements(x.data, x.dtype, x.at(b, t, h) + first, 1, count, out);
}

inline void store_row(const Rows& x, int64_t b, int64_t t, int64_t h, int64_t first, int64_t count,
                      const float* in) {
  store_elements(x.data, x.dtype, x.at(b, t, h) + first, 1, count, in);
}

// Zero is all bits zero in every dtype.
inline void zero_row(const Rows& x, int64_t b, int64_t t, int64_t h, int64_t first, int64_t count) {
  const int64_t bytes = size_of(x.dtype);
  std::memset(static_cast<std::byte*>(x.data) + (x.at(b, t, h) + first) * bytes, 0,
              static_cast<size_t>(count * bytes));
}

// Rows of an output that belong to no sequence.
inline void zero_padding(const Problem& p, const Rows& x, int64_t heads, int64_t width) {
  if (!x || !p.packed) return;
  for (int64_t t = padding_begin(p); t < p.T; ++t) {
    for (int64_t h = 0; h < heads; ++h) zero_row(x, 0, t, h, 0, width);
  }
}

// ---- Gate and beta forms. Written so that no exponential overflows. ----

inline float sigmoid(float x) {
  const float e = std::exp(-std::abs(x));
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

inline float softplus(float x) { return (x > 0 ? x : 0) + std::log1p(std::exp(-std::abs(x))); }

// exp(A_log) of a value head. A huge one is used as its logarithm: from e^88.7 on fp32 has no
// number for it, and well before that its product with a softplus that underflows would be 0.
struct GateRate {
  float value = 1, log = 0;
  bool is_huge() const { return log > 60; }
};

inline GateRate gate_rate(const Problem& p, int64_t h) {
  if (!p.A_log) return {};
  const float log = static_cast<float>(p.A_log[h]);
  return {std::exp(log), log};
}

// rate * softplus(x)
inline float times_softplus(const GateRate& rate, float x) {
  if (!rate.is_huge()) return rate.value * softplus(x);
  // Below -15 softplus(x) is e^x but for 2e-7 of it.
  return std::exp(rate.log + (x < -15 ? x : std::log(softplus(x))));
}
// rate * x; what a huge rate takes beyond e^88, where sigmoid has long been 0 or 1, stays there.
inline float times_rate(const GateRate& rate, float x) {
  if (!rate.is_huge()) return rate.value * x;
  return std::copysign(std::exp(std::min(rate.log + std::log(std::abs(x)), 88.0f)), x);
}

inline float log_decay(const Problem& p, float g, const GateRate& rate, float bias) {
  switch (p.gate_form) {
    case DELTIC_GATE_SOFTPLUS:
      return -times_softplus(rate, g + bias);
    case DELTIC_GATE_BOUNDED:
      return p.lower_bound * sigmoid(times_rate(rate, g + bias));
    default:
      return g;
  }
}

inline int64_t gate_width(const Problem& p) { return p.gate == Gate::channel ? p.K : 1; }
inline int64_t beta_width(const Problem& p) { return p.beta_kind == BetaKind::value ? p.V : 1; }

// The log decay of one token and value head: gate_width(p) numbers. Needs a gate.
inline void load_log_decay(const Problem& p, int64_t b, int64_t t, int64_t h, float* out) {
  const int64_t width = gate_width(p);
  load_row(p.g, b, t, h, 0, width, out);
  if (p.gate_form == DELTIC_GATE_LOG_DECAY) return;
  const GateRate rate = gate_rate(p, h);
  for (int64_t d = 0; d < width; ++d) {
    const float bias = p.dt_bias ? static_cast<float>(p.dt_bias[h * width + d]) : 0.0f;
    out[d] = log_decay(p, out[d], rate, bias);
  }
}

inline float beta_value(const Problem& p, float x) {
  switch (p.beta_form) {
    case DELTIC_BETA_SIGMOID:
      return sigmoid(x);
    case DELTIC_BETA_2SIGMOID:
      return 2 * sigmoid(x);
    default:
      return x;
  }
}

// beta of value columns [first, first + count): 1, one number for all, or one each.
inline void load_beta(const Problem& p, int64_t b, int64_t t, int64_t h, int64_t first,
                      int64_t count, float* out) {
  if (p.beta_kind == BetaKind::value) {
    load_row(p.beta, b, t, h, first, count, out);
    for (int64_t i = 0; i < count; ++i) out[i] = beta_value(p, out[i]);
  } else {
    float beta = 1;
    if (p.beta_kind == BetaKind::head) {
      load_row(p.beta, b, t, h, 0, 1, &beta);
      beta = beta_value(p, beta);
    }
    std::fill_n(out, count, beta);
  }
}

// 1 / sqrt(sum x^2 + 1e-6). The sum is in double: squares of large fp32 numbers overflow fp32.
inline float reciprocal_norm(const float* x, int64_t count) {
  double sum = kNormEps;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return static_cast<float>(1 / std::sqrt(sum));
}

inline void normalize(float* x, int64_t count) {
  const float r = reciprocal_norm(x, count);
  for (int64_t i = 0; i < count; ++i) x[i] *= r;
}

// ---- States ----

// Rounding by chance of the state that token t of a sequence leaves for a value head.
class RandomState {
 public:
  RandomState(const Problem& p, const Sequence& s, int64_t h, int64_t t)
      : p_(p),
        is_bf16_(kept_states(p).dtype == DType::bf16),
        position_(position_of(p, s, t)),
        head_(static_cast<uint32_t>(h)) {}

  // Element (d, v), to 16 bits and back. Neighbours in memory share a draw.
  float rounded(int64_t d, int64_t v, float x) const {
    const auto element = static_cast<uint64_t>(p_.v_first ? v * p_.K + d : d * p_.V + v);
    if (element / 8 != group_) {
      group_ = element / 8;
      draw_ = draw_group(p_.seed, position_, head_, static_cast<uint32_t>(group_));
    }
    const uint32_t random = draw_.half(static_cast<int>(element % 8));
    return is_bf16_ ? bf16_to_f32(stochastic_bf16(x, random))
                    : f16_to_f32(stochastic_f16(x, random));
  }

 private:
  const Problem& p_;
  const bool is_bf16_;
  const int64_t position_;
  const uint32_t head_;
  mutable uint64_t group_ = ~uint64_t{0};
  mutable Random128 draw_{};
};

// The states of one sequence and value head, value columns [first, first + count). S is K-first in
// scratch whatever the layout outside: element (d, c) is at d * pitch + c.
class StateColumns {
 public:
  StateColumns(const Problem& p, const Sequence& s, int64_t h, int64_t first, int64_t count,
               int64_t pitch)
      : p_(p), s_(s), h_(h), first_(first), count_(count), pitch_(pitch) {
    next_checkpoint_ = checkpoint_from(0);
  }

  void load_initial(float* S) const { load({&p_.state_in, s_.read_slot}, S); }
  // Before token t: a tree's other branch starts elsewhere than where token t - 1 ended.
  void load_branch(int64_t t, float* S) const {
    if (parent_of(p_, s_, t) != t - 1) load(jump_source(p_, s_, t), S);
  }

  void store_last(const float* S) const { write(p_.state_out, s_.write_slot, S); }

  // To be called with the state after 0, 1, ..., length tokens of the sequence.
  void keep(const float* S, int64_t tokens) {
    const int64_t slot = tokens > 0       ? token_slot(p_, s_, tokens - 1)
                         : s_.length == 0 ? s_.write_slot
                                          : -1;
    if (slot >= 0) write(p_.state_out, slot, S);
    if (tokens != next_checkpoint_) return;
    for (int64_t m = s_.ckpt_begin; m < s_.ckpt_end; ++m) {
      if (p_.ckpt_tokens(m) == tokens && checkpoint_slot(p_, m) >= 0)
        write(p_.ckpt, checkpoint_slot(p_, m), S);
    }
    next_checkpoint_ = checkpoint_from(tokens + 1);
  }

 private:
  void load(const StateSource& from, float* S) const {
    for (int64_t d = 0; d < p_.K; ++d) {
      if (from.slot < 0) {
        std::fill_n(S + d * pitch_, count_, 0.0f);
      } else {
        const States& x = *from.states;
        load_elements(x.data, x.dtype, at(x, from.slot, d), x.s_v, count_, S + d * pitch_);
      }
    }
  }
  int64_t at(const States& x, int64_t slot, int64_t d) const {
    return x.at(slot, h_) + d * x.s_k + first_ * x.s_v;
  }
  void write(const States& x, int64_t slot, const float* S) const {
    for (int64_t d = 0; d < p_.K; ++d) {
      store_elements(x.data, x.dtype, at(x, slot, d), x.s_v, count_, S + d * pitch_);
    }
  }
  // The smallest token count >= `tokens` with a checkpoint. The list may be in any order; looking
  // through it once per checkpoint rather than once per token keeps long sequences cheap.
  int64_t checkpoint_from(int64_t tokens) const {
    int64_t next = std::numeric_limits<int64_t>::max();
    for (int64_t m = s_.ckpt_begin; m < s_.ckpt_end; ++m) {
      if (checkpoint_slot(p_, m) >= 0 && p_.ckpt_tokens(m) >= tokens) {
        next = std::min(next, p_.ckpt_tokens(m));
      }
    }
    return next;
  }

  const Problem& p_;
  const Sequence& s_;
  int64_t h_, first_, count_, pitch_, next_checkpoint_ = 0;
};

}  // namespace deltic
