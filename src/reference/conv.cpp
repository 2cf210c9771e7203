// The causal depthwise convolution and its gradient, channel by channel.
//
// With X the inputs of a sequence after those its state has (0 where there is none), and X_t the
// input of its token t:
//
//     pre_t = bias + sum_j w_j X_{t-W+1+j},   y_t = act(pre_t)
//     dpre_t = dy_t act'(pre_t),  dw_j += dpre_t X_{t-W+1+j},  dX_{t-W+1+j} += dpre_t w_j
//
// The final state is the end of X, and its gradient that of X's end. Of a state with drafted tokens
// the accepted ones count, and the state left behind begins W - 2 inputs before the call's first.
#include <omp.h>

#include "reference/forms.h"
#include "reference/operations.h"

namespace deltic::reference {
namespace {

double activation(const Problem& p, double x) {
  return p.activation == DELTIC_ACTIVATION_SILU ? x * sigmoid(x) : x;
}
double activation_slope(const Problem& p, double x) {
  return p.activation == DELTIC_ACTIVATION_SILU ? sigmoid(x) + x * sigmoid_slope(x) : 1;
}

// One channel. p.V inputs are in a state; a call without one has 0 there.
class Channel {
 public:
  Channel(const Problem& p, std::byte* base) : p_(p), scratch_(base) {
    before_ = std::max(p.V, p.taps - 1);
    X_ = scratch_.take<double>(before_ + p.T);
    dX_ = scratch_.take<double>(p.is_gradient ? before_ + p.T : 0);
    dw_ = scratch_.take<double>(p.taps);
  }
  size_t bytes() const { return scratch_.used(); }

  void forward(int64_t d) {
    for (int64_t n = 0; n < p_.N; ++n) {
      const Sequence s = sequence(p_, n);
      load_inputs(s, d);
      for (int64_t t = 0; t < s.length; ++t) {
        put(p_.out, s.batch, s.begin + t, 0, d, s.skipped ? 0 : activation(p_, pre(d, t)));
      }
      for (int64_t m = s.ckpt_begin; m < s.ckpt_end && !s.skipped; ++m) {
        const int64_t slot = checkpoint_slot(p_, m);
        for (int64_t i = 0; i < p_.V && slot >= 0; ++i) {
          put(p_.ckpt, slot, 0, d, i, X(p_.ckpt_tokens(m) - p_.V + i));
        }
      }
      for (int64_t i = 0; i < p_.V && s.write_slot >= 0; ++i) {
        const int64_t t = s.left_from + i;
        put(p_.state_out, s.write_slot, 0, d, i, t < s.length ? X(t) : 0);
      }
    }
  }

  void backward(int64_t d) {
    double dbias = 0;
    std::fill_n(dw_, p_.taps, 0.0);
    for (int64_t n = 0; n < p_.N; ++n) {
      const Sequence s = sequence(p_, n);
      load_inputs(s, d);
      std::fill_n(dX_, before_ + s.length, 0.0);
      for (int64_t i = 0; i < p_.V && p_.d_final; ++i) {
        dX(s.length - p_.V + i) += get(p_.d_final, n, 0, d, i);
      }
      for (int64_t t = 0; t < s.length && p_.d_out; ++t) {
        const double dpre =
            get(p_.d_out, s.batch, s.begin + t, 0, d) * activation_slope(p_, pre(d, t));
        dbias += dpre;
        for (int64_t j = 0; j < p_.taps; ++j) {
          dw_[j] += dpre * X(t - p_.taps + 1 + j);
          dX(t - p_.taps + 1 + j) += dpre * weight(d, j);
        }
      }
      for (int64_t t = 0; t < s.length && p_.dx; ++t) {
        put(p_.dx, s.batch, s.begin + t, 0, d, dX(t));
      }
      for (int64_t i = 0; i < p_.V && p_.d_initial; ++i) {
        put(p_.d_initial, n, 0, d, i, dX(i - p_.V));
      }
    }
    for (int64_t j = 0; j < p_.taps && p_.dweight; ++j) put(p_.dweight, d * p_.taps + j, dw_[j]);
    if (p_.dbias) put(p_.dbias, d, dbias);
  }

 private:
  // Of token t; those before the first are negative.
  double& X(int64_t t) const { return X_[before_ + t]; }
  double& dX(int64_t t) const { return dX_[before_ + t]; }
  double weight(int64_t d, int64_t j) const { return p_.weight[d * p_.taps + j]; }

  void load_inputs(const Sequence& s, int64_t d) {
    for (int64_t t = -before_; t < 0; ++t) {
      const bool is_kept = s.read_slot >= 0 && t >= -s.inputs;
      X(t) = is_kept ? get(p_.state_in, s.read_slot, 0, d, s.inputs + t) : 0;
    }
    for (int64_t t = 0; t < s.length; ++t) X(t) = get(p_.x, s.batch, s.begin + t, 0, d);
  }
  double pre(int64_t d, int64_t t) const {
    double sum = p_.bias ? p_.bias[d] : 0;
    for (int64_t j = 0; j < p_.taps; ++j) sum += weight(d, j) * X(t - p_.taps + 1 + j);
    return sum;
  }

  const Problem& p_;
  Scratch scratch_;
  int64_t before_;
  double *X_, *dX_, *dw_;
};

}  // namespace

size_t conv_bytes(const Problem& p) {
  return bytes_of_threads(p, p.K, Channel(p, nullptr).bytes());
}

void run_conv(const Problem& p, std::byte* workspace) {
  const size_t bytes = Channel(p, nullptr).bytes();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads(p, p.K))
  for (int64_t d = 0; d < p.K; ++d) {
    Channel channel(p, workspace + static_cast<size_t>(omp_get_thread_num()) * bytes);
    p.is_gradient ? channel.backward(d) : channel.forward(d);
  }
  put_zero_padding(p, p.is_gradient ? p.dx : p.out, 1, p.K);
}

}  // namespace deltic::reference
