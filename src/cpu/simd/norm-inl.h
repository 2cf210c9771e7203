// Rows of the gated RMS norm in vectors. One source for all instruction sets; included once per
// target.
#if defined(DELTIC_CPU_SIMD_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_NORM_INL_H_
#undef DELTIC_CPU_SIMD_NORM_INL_H_
#else
#define DELTIC_CPU_SIMD_NORM_INL_H_
#endif

#include "cpu/norm_math.h"
#include "cpu/simd/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

struct VectorMath {
  const Problem& p;
  int64_t width;

  void load(const Rows& rows, int64_t b, int64_t t, int64_t h, float* to) const {
    load_row(rows.data, rows.dtype, rows.at(b, t, h), p.K, width, to);
  }
  void store(const Rows& rows, int64_t b, int64_t t, int64_t h, const float* from) const {
    store_row(from, p.K, rows.data, rows.dtype, rows.at(b, t, h));
  }

  // A gate and its slope.
  struct Gated {
    Vec value, slope;
  };
  HWY_INLINE Gated gate(Vec z) const {
    const Vec one = hn::Set(F32(), 1.0f);
    if (p.activation == DELTIC_ACTIVATION_NONE) return {z, one};
    const Vec s = sigmoid(z), other = sigmoid(hn::Neg(z));  // 1 - s would lose digits
    if (p.activation == DELTIC_ACTIVATION_SIGMOID) return {s, hn::Mul(s, other)};
    return {hn::Mul(z, s), hn::Mul(s, hn::MulAdd(z, other, one))};
  }
  HWY_INLINE Vec gate_value(Vec z) const {
    if (p.activation == DELTIC_ACTIVATION_NONE) return z;
    const Vec s = sigmoid(z);
    return p.activation == DELTIC_ACTIVATION_SIGMOID ? s : hn::Mul(z, s);
  }

  float reciprocal(const float* x) const {
    const F32 d;
    Vec sum[2] = {hn::Zero(d), hn::Zero(d)};
    int64_t i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
      const Vec a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + kLanes);
      sum[0] = hn::MulAdd(a, a, sum[0]), sum[1] = hn::MulAdd(b, b, sum[1]);
    }
    for (; i < width; i += kLanes) {
      const Vec a = hn::LoadU(d, x + i);
      sum[0] = hn::MulAdd(a, a, sum[0]);
    }
    const float mean = sum_lanes(hn::Add(sum[0], sum[1])) / static_cast<float>(p.K) + p.eps;
    // Squares of finite numbers left the range of fp32, or a number is not finite: fp64 knows.
    if (!(mean >= 1e-30f && mean <= std::numeric_limits<float>::max())) {
      return norm::PlainMath{p, width}.reciprocal(x);
    }
    return 1.0f / std::sqrt(mean);
  }

  void forward(const norm::Row& row, const float* w) const {
    const F32 d;
    const Vec r = hn::Set(d, reciprocal(row.x));
    for (int64_t i = 0; i < width; i += kLanes) {
      Vec y = hn::Mul(hn::Mul(hn::LoadU(d, row.x + i), r), hn::LoadU(d, w + i));
      if (p.z) y = hn::Mul(y, gate_value(hn::LoadU(d, row.z + i)));
      hn::StoreU(y, d, row.dy + i);
    }
  }

  void backward(const norm::Row& row, const float* w, float* dw) const {
    const F32 d;
    const float reciprocal_of_row = reciprocal(row.x);
    const Vec r = hn::Set(d, reciprocal_of_row), one = hn::Set(d, 1.0f);
    Vec along = hn::Zero(d);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec n = hn::Mul(hn::LoadU(d, row.x + i), r), weight = hn::LoadU(d, w + i);
      const Vec dy = hn::LoadU(d, row.dy + i);
      const Gated a = p.z ? gate(hn::LoadU(d, row.z + i)) : Gated{one, hn::Zero(d)};
      const Vec of_row = hn::Mul(dy, a.value), dn = hn::Mul(of_row, weight);
      if (dw != nullptr) hn::StoreU(hn::MulAdd(of_row, n, hn::LoadU(d, dw + i)), d, dw + i);
      hn::StoreU(hn::Mul(hn::Mul(dy, n), hn::Mul(weight, a.slope)), d, row.z + i);
      hn::StoreU(n, d, row.x + i), hn::StoreU(dn, d, row.dy + i);
      along = hn::MulAdd(dn, n, along);
    }
    const Vec mean = hn::Set(d, sum_lanes(along) / static_cast<float>(p.K));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec left = hn::NegMulAdd(hn::LoadU(d, row.x + i), mean, hn::LoadU(d, row.dy + i));
      hn::StoreU(hn::Mul(left, r), d, row.dy + i);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
