// The gated RMS norm and its gradient, row by row.
//
//     r = (mean_d x_d^2 + eps)^-1/2,   n = r x,   y = n w act(z)
//     dn = dy w act(z),   dx = r (dn - n mean_d(dn n)),   dz = dy n w act'(z),   dw += dy n act(z)
#include <omp.h>

#include <cmath>

#include "reference/forms.h"
#include "reference/operations.h"

namespace deltic::reference {
namespace {

struct Gated {
  double value, slope;
};
Gated gate_of(const Problem& p, double z) {
  switch (p.activation) {
    case DELTIC_ACTIVATION_SILU:
      return {z * sigmoid(z), sigmoid(z) + z * sigmoid_slope(z)};
    case DELTIC_ACTIVATION_SIGMOID:
      return {sigmoid(z), sigmoid_slope(z)};
    default:
      return {z, 1};
  }
}

// One head's rows: n and dn of one, and the head's share of dw.
class Head {
 public:
  Head(const Problem& p, std::byte* base) : p_(p), scratch_(base) {
    n_ = scratch_.take<double>(p.K), dn_ = scratch_.take<double>(p.K);
  }
  size_t bytes() const { return scratch_.used(); }

  void run(int64_t h, double* dw) {
    for (int64_t b = 0; b < p_.B; ++b) {
      for (int64_t t = 0; t < padding_begin(p_); ++t) {
        normalize(b, t, h);
        p_.is_gradient ? backward(b, t, h, dw) : forward(b, t, h);
      }
    }
  }

 private:
  double weight(int64_t d) const { return p_.weight ? p_.weight[d] : 1; }
  Gated gate(int64_t b, int64_t t, int64_t h, int64_t d) const {
    return p_.z ? gate_of(p_, get(p_.z, b, t, h, d)) : Gated{1, 0};
  }
  void normalize(int64_t b, int64_t t, int64_t h) {
    for (int64_t d = 0; d < p_.K; ++d) n_[d] = get(p_.x, b, t, h, d);
    const double mean = dot(n_, n_, p_.K) / static_cast<double>(p_.K);
    r_ = 1 / std::sqrt(mean + static_cast<double>(p_.eps));
    for (int64_t d = 0; d < p_.K; ++d) n_[d] *= r_;
  }
  void forward(int64_t b, int64_t t, int64_t h) const {
    for (int64_t d = 0; d < p_.K; ++d) {
      put(p_.out, b, t, h, d, n_[d] * weight(d) * gate(b, t, h, d).value);
    }
  }
  void backward(int64_t b, int64_t t, int64_t h, double* dw) const {
    for (int64_t d = 0; d < p_.K; ++d) {
      const double dy = get(p_.d_out, b, t, h, d);
      const Gated a = gate(b, t, h, d);
      dn_[d] = dy * weight(d) * a.value;
      if (p_.dz) put(p_.dz, b, t, h, d, dy * n_[d] * weight(d) * a.slope);
      dw[d] += dy * n_[d] * a.value;
    }
    const double mean = dot(dn_, n_, p_.K) / static_cast<double>(p_.K);
    for (int64_t d = 0; d < p_.K && p_.dx; ++d) {
      put(p_.dx, b, t, h, d, r_ * (dn_[d] - n_[d] * mean));
    }
  }

  const Problem& p_;
  Scratch scratch_;
  double *n_, *dn_, r_ = 0;
};

// The heads' shares of dw, then what the threads need.
struct Memory {
  Memory(const Problem& p, std::byte* base) : scratch(base) {
    dw = scratch.take<double>(p.is_gradient ? p.H : 0, p.K);
    rows = scratch.take<std::byte>(bytes_of_threads(p, p.H, Head(p, nullptr).bytes()));
  }
  Scratch scratch;
  double* dw;
  std::byte* rows;
};

}  // namespace

size_t norm_bytes(const Problem& p) { return Memory(p, nullptr).scratch.used(); }

void run_norm(const Problem& p, std::byte* workspace) {
  const Memory m(p, workspace);
  const size_t bytes = Head(p, nullptr).bytes();
  const int64_t heads = p.B * p.T > 0 || p.dweight ? p.H : 0;  // of nothing there may be 2^50
#pragma omp parallel for schedule(dynamic) num_threads(num_threads(p, heads))
  for (int64_t h = 0; h < heads; ++h) {
    Head head(p, m.rows + static_cast<size_t>(omp_get_thread_num()) * bytes);
    double* dw = p.is_gradient ? m.dw + h * p.K : nullptr;
    if (p.is_gradient) std::fill_n(dw, p.K, 0.0);
    head.run(h, dw);
  }
  for (int64_t d = 0; d < p.K && p.dweight; ++d) {
    double sum = 0;
    for (int64_t h = 0; h < heads; ++h) sum += m.dw[h * p.K + d];
    put(p.dweight, d, sum);
  }
  for (const Rows* rows : {&p.out, &p.dx, &p.dz}) put_zero_padding(p, *rows, p.H, p.K);
}

}  // namespace deltic::reference
