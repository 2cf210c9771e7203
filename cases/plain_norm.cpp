// The plain algorithm of the gated RMS norm and its gradient: fp32, sums in order.
#include <cmath>

#include "cases/plain.h"

namespace deltic::cases::plain {
namespace {

struct Gated {
  float value, slope;
};
Gated gate_of(Activation activation, float z) {
  const float s = 1.0f / (1.0f + std::exp(-z));
  if (activation == Activation::none) return {z, 1.0f};
  if (activation == Activation::sigmoid) return {s, s * (1.0f - s)};
  return {z * s, s * (1.0f + z * (1.0f - s))};
}

}  // namespace

Values norm(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  const Floats z = p.floats("z"), weight = p.floats("weight"), d_out = p.floats("d_out");
  Values all;
  const Output out = make_output(instance, all, "out", 0.0);
  const Output dx = make_output(instance, all, "dx", 0.0);
  const Output dz = make_output(instance, all, "dz", 0.0);
  Floats dw(static_cast<size_t>(c.K), 0.0f), n(dw.size()), dn(dw.size());
  const float eps = static_cast<float>(c.eps.value_or(1e-5)), width = static_cast<float>(c.K);
  for (int64_t s = 0; s < c.num_sequences(); ++s) {
    const int64_t first = p.first_token(s) * c.H, rows = c.sequence_length(s) * c.H;
    for (int64_t r = first; r < first + rows; ++r) {
      float squares = 0, along = 0;
      const auto at = [&](size_t d) { return static_cast<size_t>(r * c.K) + d; };
      for (size_t d = 0; d < n.size(); ++d) squares += p.x[at(d)] * p.x[at(d)];
      const float factor = 1.0f / std::sqrt(squares / width + eps);
      for (size_t d = 0; d < n.size(); ++d) {
        const Gated a = z.empty() ? Gated{1.0f, 0.0f} : gate_of(c.activation, z[at(d)]);
        const float w = weight.empty() ? 1.0f : weight[d];
        n[d] = p.x[at(d)] * factor;
        if (!c.gradient) {
          out.put(at(d), n[d] * w * a.value);
          continue;
        }
        const float dy = d_out[at(d)];
        dn[d] = dy * w * a.value;
        dz.put(at(d), dy * n[d] * w * a.slope);
        dw[d] += dy * n[d] * a.value;
        along += dn[d] * n[d];
      }
      for (size_t d = 0; d < n.size() && c.gradient; ++d) {
        dx.put(at(d), factor * (dn[d] - n[d] * along / width));
      }
    }
  }
  const Output dweight = make_output(instance, all, "dweight", 0.0);
  for (size_t d = 0; d < dw.size() && c.gradient; ++d) dweight.put(d, dw[d]);
  return all;
}

}  // namespace deltic::cases::plain
