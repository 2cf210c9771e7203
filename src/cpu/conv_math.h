// The causal depthwise convolution and its gradient, as cpu.plain has it: the equation, channel by
// channel and token by token.
//
//     pre_t = bias + sum_j w_j x_{t-W+1+j},  y_t = act(pre_t)
//     dpre_t = dy_t act'(pre_t),  dx_s = sum_j w_j dpre_{s+W-1-j},  dw_j = sum_t dpre_t x_{t-W+1+j}
#pragma once

#include <algorithm>

#include "cpu/recurrence.h"

namespace deltic::conv {

inline float activate(const Problem& p, float pre) {
  return p.activation == DELTIC_ACTIVATION_SILU ? pre * sigmoid(pre) : pre;
}
inline float activation_slope(const Problem& p, float pre) {
  if (p.activation != DELTIC_ACTIVATION_SILU) return 1;
  return sigmoid(pre) * (1 + pre * sigmoid(-pre));
}

// One channel of a call: its parameters, and its inputs by (sequence, token).
class Channel {
 public:
  Channel(const Problem& p, int64_t d) : p_(p), d_(d) {
    for (int64_t j = 0; j < p.taps; ++j) w_[j] = static_cast<float>(p.weight[d * p.taps + j]);
    if (p.bias) bias_ = static_cast<float>(p.bias[d]);
  }

  void forward() const {
    for (int64_t n = 0; n < p_.N; ++n) {
      const Sequence s = sequence(p_, n);
      for (int64_t t = 0; t < s.length; ++t) {
        put(p_.out, s, t, s.skipped ? 0 : activate(p_, pre(s, t)));
      }
      for (int64_t m = s.ckpt_begin; m < s.ckpt_end && !s.skipped; ++m) {
        const int64_t slot = checkpoint_slot(p_, m);
        for (int64_t i = 0; i < p_.V && slot >= 0; ++i) {
          put(p_.ckpt, slot, i, input(s, p_.ckpt_tokens(m) - p_.V + i));
        }
      }
      // Upwards: a state updated in place is read at or above what is written.
      for (int64_t i = 0; i < p_.V && s.write_slot >= 0; ++i) {
        const int64_t t = s.left_from + i;
        put(p_.state_out, s.write_slot, i, t < s.length ? input(s, t) : 0);
      }
    }
  }

  void backward() const {
    double dw[kMaxTaps] = {}, dbias = 0;
    for (int64_t n = 0; n < p_.N; ++n) {
      const Sequence s = sequence(p_, n);
      for (int64_t t = 0; t < s.length; ++t) {
        const double dpre = static_cast<double>(d_pre(s, t));
        for (int64_t j = 0; j < p_.taps; ++j) {
          dw[j] += dpre * static_cast<double>(input(s, t - p_.taps + 1 + j));
        }
        dbias += dpre;
        if (p_.dx) put(p_.dx, s, t, d_input(s, t));
      }
      for (int64_t i = 0; i < p_.V && p_.d_initial; ++i) {
        put(p_.d_initial, n, i, d_input(s, i - p_.V));
      }
    }
    for (int64_t j = 0; j < p_.taps && p_.dweight; ++j) {
      store(p_.dweight.data, p_.dweight.dtype, p_.dweight.at(d_ * p_.taps + j), dw[j]);
    }
    if (p_.dbias) store(p_.dbias.data, p_.dbias.dtype, p_.dbias.at(d_), dbias);
  }

 private:
  static constexpr int64_t kMaxTaps = 8;

  void put(const Rows& rows, const Sequence& s, int64_t t, float x) const {
    store_row(rows, s.batch, s.begin + t, 0, d_, 1, &x);
  }
  void put(const States& states, int64_t slot, int64_t i, float x) const {
    store_elements(states.data, states.dtype, at(states, slot, i), 1, 1, &x);
  }
  int64_t at(const States& x, int64_t slot, int64_t i) const {
    return x.at(slot, 0) + d_ * x.s_k + i * x.s_v;
  }
  // The input at token t; before the first one what the initial state has, or 0.
  float input(const Sequence& s, int64_t t) const {
    float x = 0;
    if (t >= 0) {
      load_row(p_.x, s.batch, s.begin + t, 0, d_, 1, &x);
    } else if (s.read_slot >= 0 && s.inputs + t >= 0) {
      load_elements(p_.state_in.data, p_.state_in.dtype, at(p_.state_in, s.read_slot, s.inputs + t),
                    1, 1, &x);
    }
    return x;
  }
  float pre(const Sequence& s, int64_t t) const {
    float sum = bias_;
    for (int64_t j = 0; j < p_.taps; ++j) sum += w_[j] * input(s, t - p_.taps + 1 + j);
    return sum;
  }
  float d_pre(const Sequence& s, int64_t t) const {
    if (!p_.d_out) return 0;
    float dy;
    load_row(p_.d_out, s.batch, s.begin + t, 0, d_, 1, &dy);
    return dy * activation_slope(p_, pre(s, t));
  }
  // Of the input at token t, which may lie before the first one: what the final state and every
  // output that saw it say.
  float d_input(const Sequence& s, int64_t t) const {
    float sum = 0;
    const int64_t kept = p_.V - s.length + t;  // where the final state has it
    if (p_.d_final && kept >= 0 && kept < p_.V) {
      load_elements(p_.d_final.data, p_.d_final.dtype, at(p_.d_final, s.n, kept), 1, 1, &sum);
    }
    for (int64_t j = p_.taps - 1; j >= 0; --j) {
      const int64_t later = t + p_.taps - 1 - j;
      if (later >= 0 && later < s.length) sum += w_[j] * d_pre(s, later);
    }
    return sum;
  }

  const Problem& p_;
  int64_t d_;
  float w_[kMaxTaps] = {}, bias_ = 0;
};

// Needs no workspace.
inline void run(const Problem& p) {
  // Neighbours of 64 share lines of memory; about 10 ns for a number.
  constexpr int64_t kChannels = 64;
  const int64_t tasks = (p.K + kChannels - 1) / kChannels;
  const double numbers = (static_cast<double>(p.B) * static_cast<double>(p.T) +
                          static_cast<double>(p.N) * static_cast<double>(p.V)) *
                         kChannels;
  const int threads = cpu::useful_threads(p, static_cast<double>(tasks), 10 * numbers);
  cpu::run_team(threads, [&](const cpu::Member& member) {
    member.for_each(tasks, [&](int64_t i) {
      for (int64_t d = i * kChannels; d < std::min(p.K, (i + 1) * kChannels); ++d) {
        const Channel channel(p, d);
        p.is_gradient ? channel.backward() : channel.forward();
      }
    });
  });
  zero_padding(p, p.is_gradient ? p.dx : p.out, 1, p.K);
}

}  // namespace deltic::conv
