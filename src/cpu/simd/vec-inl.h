// Rows of numbers: conversion at the edges, gates and norms, transposes, sums. One source for all
// instruction sets; included once per target.
#if defined(DELTIC_CPU_SIMD_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_VEC_INL_H_
#undef DELTIC_CPU_SIMD_VEC_INL_H_
#else
#define DELTIC_CPU_SIMD_VEC_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/problem.h"

#if defined(__clang__)
#define DELTIC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DELTIC_UNROLL _Pragma("GCC unroll 16")
#endif

// Of a lambda that is the body of a loop over register blocks: called, it would pass its
// accumulators through memory.
#define DELTIC_INLINE __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using Vec = hn::Vec<F32>;
using HalfU16 = hn::Rebind<uint16_t, F32>;
using HalfF16 = hn::Rebind<hwy::float16_t, F32>;
constexpr int64_t kLanes = HWY_LANES(float);  // 16, 8 or 4: fixed on every target used here

// Rows in scratch are padded with zeros to a multiple of this, the widest vector's lanes.
constexpr int64_t kRowAlign = 16;
inline int64_t padded(int64_t n) { return (n + kRowAlign - 1) / kRowAlign * kRowAlign; }

HWY_INLINE Vec load_bf16(const uint16_t* src) {
  const F32 d;
  const U32 du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(HalfU16(), src))));
}

// Round to nearest even (Highway 1.0 truncates); NaN stays NaN.
HWY_INLINE void store_bf16(Vec x, uint16_t* dst) {
  const U32 du;
  const auto bits = hn::BitCast(du, x);
  const auto lsb = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(lsb, hn::Set(du, 0x7FFFu))));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(x));
  const auto half = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC0u), rounded);
  hn::StoreU(hn::DemoteTo(HalfU16(), hn::BitCast(hn::RebindToSigned<U32>(), half)), HalfU16(), dst);
}

HWY_INLINE Vec load_f16(const uint16_t* src) {
  const auto* p = reinterpret_cast<const hwy::float16_t*>(src);
  return hn::PromoteTo(F32(), hn::LoadU(HalfF16(), p));
}

HWY_INLINE void store_f16(Vec x, uint16_t* dst) {
#if HWY_TARGET <= HWY_AVX2  // F16C rounds to nearest even; below it the emulation does not
  hn::StoreU(hn::DemoteTo(HalfF16(), x), HalfF16(), reinterpret_cast<hwy::float16_t*>(dst));
#else
  alignas(64) float lanes[kLanes];
  hn::Store(x, F32(), lanes);
  for (int64_t i = 0; i < kLanes; ++i) dst[i] = f32_to_f16(lanes[i]);
#endif
}

// A vector's elements in memory, by dtype.
struct LoadF32 {
  using Element = float;
  static HWY_INLINE Vec load(const float* p) { return hn::LoadU(F32(), p); }
  static HWY_INLINE void store(Vec x, float* p) { hn::StoreU(x, F32(), p); }
};
struct LoadBf16 {
  using Element = uint16_t;
  static HWY_INLINE Vec load(const uint16_t* p) { return load_bf16(p); }
  static HWY_INLINE void store(Vec x, uint16_t* p) { store_bf16(x, p); }
};
struct LoadF16 {
  using Element = uint16_t;
  static HWY_INLINE Vec load(const uint16_t* p) { return load_f16(p); }
  static HWY_INLINE void store(Vec x, uint16_t* p) { store_f16(x, p); }
};

// use(how elements of this dtype are loaded and stored).
template <class Use>
HWY_INLINE void with_elements(DType type, const Use& use) {
  switch (type) {
    case DType::f32:
      return use(LoadF32());
    case DType::bf16:
      return use(LoadBf16());
    default:
      return use(LoadF16());
  }
}

// n elements of any dtype to fp32, zeros up to `width`.
inline void load_row(const void* data, DType type, int64_t at, int64_t n, int64_t width,
                     float* dst) {
  const F32 d;
  int64_t i = 0;
  with_elements(type, [&](auto how) DELTIC_INLINE {
    const auto* src = static_cast<const typename decltype(how)::Element*>(data) + at;
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(how.load(src + i), d, dst + i);
  });
  for (; i < n; ++i) dst[i] = load_f32(data, type, at + i);
  for (; i < width; ++i) dst[i] = 0.0f;
}

inline void store_row(const float* src, int64_t n, void* data, DType type, int64_t at) {
  const F32 d;
  int64_t i = 0;
  with_elements(type, [&](auto how) DELTIC_INLINE {
    auto* dst = static_cast<typename decltype(how)::Element*>(data) + at;
    for (; i + kLanes <= n; i += kLanes) how.store(hn::LoadU(d, src + i), dst + i);
  });
  for (; i < n; ++i) store(data, type, at + i, static_cast<double>(src[i]));
}

// n zeros of any dtype.
inline void zero_row(void* data, DType type, int64_t at, int64_t n) {
  const auto element = static_cast<size_t>(size_of(type));
  std::memset(static_cast<std::byte*>(data) + static_cast<size_t>(at) * element, 0,
              static_cast<size_t>(n) * element);
}

HWY_INLINE float sum_lanes(Vec x) { return hn::GetLane(hn::SumOfLanes(F32(), x)); }

// The sum of squares over a row of `width`, a multiple of 16: vector(i) gives its elements from i
// on, in order of i.
template <class Vector>
HWY_INLINE float sum_squares(const Vector& vector, int64_t width) {
  const F32 d;
  // Four sums side by side: in one each addition would wait for the one before, 4 or 5 cycles.
  Vec sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t i = 0;
  const auto add = [&](Vec& to, int64_t at) DELTIC_INLINE {
    const Vec v = vector(at);
    to = hn::MulAdd(v, v, to);
  };
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    DELTIC_UNROLL
    for (int j = 0; j < 4; ++j) add(sum[j], i + j * kLanes);
  }
  for (; i < width; i += kLanes) add(sum[0], i);
  return sum_lanes(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
}
// 1 / sqrt(squares + 1e-6), of row x; in fp64 where the squares of finite numbers overflow.
inline bool is_finite_sum(float squares) { return squares <= std::numeric_limits<float>::max(); }
inline float inverse_norm_from(float squares, const float* x, int64_t width) {
  if (is_finite_sum(squares)) return 1.0f / std::sqrt(squares + static_cast<float>(kNormEps));
  double wide = kNormEps;
  for (int64_t i = 0; i < width; ++i) wide += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return static_cast<float>(1 / std::sqrt(wide));
}
inline float inverse_norm(const float* x, int64_t width) {
  const auto vector = [&](int64_t i) DELTIC_INLINE { return hn::LoadU(F32(), x + i); };
  return inverse_norm_from(sum_squares(vector, width), x, width);
}

inline void scale_row_into(const float* x, int64_t width, float factor, float* to) {
  const F32 d;
  const Vec f = hn::Set(d, factor);
  for (int64_t i = 0; i < width; i += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, to + i);
}
inline void scale_row(float* x, int64_t width, float factor) {
  scale_row_into(x, width, factor, x);
}

// Highway's Exp is right up to 88; nothing here asks for more. It makes 0 of NaN, which would hide
// one: NaN goes through all of these.
HWY_INLINE Vec exp_of(Vec x) {
  const F32 d;
  return hn::IfThenElse(hn::Eq(x, x), hn::Exp(d, x), x);
}
HWY_INLINE Vec sigmoid(Vec x) {
  const F32 d;
  const Vec one = hn::Set(d, 1.0f);
  const Vec e = exp_of(hn::Neg(hn::Abs(x)));
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
}
HWY_INLINE Vec softplus(Vec x) {
  const F32 d;
  const Vec tail = hn::Log1p(d, exp_of(hn::Neg(hn::Abs(x))));
  return hn::Add(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x), tail);
}

// Of the sigmoid, without 1 - s, which loses the digits where s is near 1.
HWY_INLINE Vec sigmoid_slope(Vec x) { return hn::Mul(sigmoid(x), sigmoid(hn::Neg(x))); }

// The gate's form on raw values. factor is exp(A_log), or 1 without it.
HWY_INLINE Vec gate_value(deltic_gate_form form, Vec x, Vec bias, float factor, float lower_bound) {
  const F32 d;
  if (form == DELTIC_GATE_LOG_DECAY) return x;
  const Vec shifted = hn::Add(x, bias);
  if (form == DELTIC_GATE_SOFTPLUS) return hn::Mul(hn::Set(d, -factor), softplus(shifted));
  return hn::Mul(hn::Set(d, lower_bound), sigmoid(hn::Mul(hn::Set(d, factor), shifted)));
}
// Clamped below where exp is 0 in fp32 and above where it is still finite; NaN goes through (x86
// max and min return their second operand then).
HWY_INLINE Vec clamp_log_decay(Vec g) {
  const F32 d;
  return hn::Min(hn::Set(d, 88.0f), hn::Max(hn::Set(d, kMinLogDecay), g));
}

HWY_INLINE Vec beta_value(deltic_beta_form form, Vec x) {
  if (form == DELTIC_BETA_VALUE) return x;
  const Vec s = sigmoid(x);
  return form == DELTIC_BETA_SIGMOID ? s : hn::Add(s, s);
}

#if HWY_TARGET == HWY_AVX3
// One block of 16 x 16: pairs of rows, of pairs, then 128-bit blocks change places twice.
HWY_INLINE void transpose_16x16(const float* src, int64_t src_stride, float* dst,
                                int64_t dst_stride) {
  __m512 r[16], t[16];
  DELTIC_UNROLL
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(src + i * src_stride);
  DELTIC_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto pairs = [](__m512 a, __m512 b, bool high) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  };
  DELTIC_UNROLL
  for (int i = 0; i < 16; i += 4) {  // r[i + k]: column k of each 128-bit block, rows i .. i + 3
    r[i] = pairs(t[i], t[i + 2], false), r[i + 1] = pairs(t[i], t[i + 2], true);
    r[i + 2] = pairs(t[i + 1], t[i + 3], false), r[i + 3] = pairs(t[i + 1], t[i + 3], true);
  }
  DELTIC_UNROLL
  for (int k = 0; k < 4; ++k) {
    const __m512 a = _mm512_shuffle_f32x4(r[k], r[4 + k], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(r[k], r[4 + k], 0xDD);
    const __m512 e = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0xDD);
    _mm512_storeu_ps(dst + k * dst_stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(dst + (4 + k) * dst_stride, _mm512_shuffle_f32x4(c, e, 0x88));
    _mm512_storeu_ps(dst + (8 + k) * dst_stride, _mm512_shuffle_f32x4(a, b, 0xDD));
    _mm512_storeu_ps(dst + (12 + k) * dst_stride, _mm512_shuffle_f32x4(c, e, 0xDD));
  }
}
#endif

#if HWY_TARGET == HWY_AVX2
// One block of 8 x 8: pairs of rows, of pairs, then the halves.
HWY_INLINE void transpose_8x8(const float* src, int64_t src_stride, float* dst,
                              int64_t dst_stride) {
  const F32 d;
  const hn::RepartitionToWide<F32> dw;
  Vec r[8], t[8];
  DELTIC_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = hn::LoadU(d, src + i * src_stride);
  DELTIC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = hn::InterleaveLower(d, r[i], r[i + 1]);
    t[i + 1] = hn::InterleaveUpper(d, r[i], r[i + 1]);
  }
  const auto pairs = [&](Vec a, Vec b, bool high) DELTIC_INLINE {
    const auto x = hn::BitCast(dw, a), y = hn::BitCast(dw, b);
    return hn::BitCast(d, high ? hn::InterleaveUpper(dw, x, y) : hn::InterleaveLower(dw, x, y));
  };
  DELTIC_UNROLL
  for (int i = 0; i < 8; i += 4) {  // r[i + k]: column k of each half, rows i .. i + 3
    r[i] = pairs(t[i], t[i + 2], false), r[i + 1] = pairs(t[i], t[i + 2], true);
    r[i + 2] = pairs(t[i + 1], t[i + 3], false), r[i + 3] = pairs(t[i + 1], t[i + 3], true);
  }
  DELTIC_UNROLL
  for (int k = 0; k < 4; ++k) {
    hn::StoreU(hn::ConcatLowerLower(d, r[4 + k], r[k]), d, dst + k * dst_stride);
    hn::StoreU(hn::ConcatUpperUpper(d, r[4 + k], r[k]), d, dst + (4 + k) * dst_stride);
  }
}
#endif

// dst[c][r] = src[r][c] for `rows` x `cols`, multiples of 4; strides in elements.
inline void transpose(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst,
                      int64_t dst_stride) {
#if HWY_TARGET == HWY_AVX3
  if (rows % 16 == 0 && cols % 16 == 0) {
    for (int64_t r = 0; r < rows; r += 16) {
      for (int64_t c = 0; c < cols; c += 16) {
        transpose_16x16(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride);
      }
    }
    return;
  }
#elif HWY_TARGET == HWY_AVX2
  if (rows % 8 == 0 && cols % 8 == 0) {
    for (int64_t r = 0; r < rows; r += 8) {
      for (int64_t c = 0; c < cols; c += 8) {
        transpose_8x8(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride);
      }
    }
    return;
  }
#endif
  const hn::CappedTag<float, 4> d4;
  const hn::RepartitionToWide<decltype(d4)> d2;
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < cols; c += 4) {
      const float* s = src + r * src_stride + c;
      const auto r0 = hn::LoadU(d4, s), r1 = hn::LoadU(d4, s + src_stride);
      const auto r2 = hn::LoadU(d4, s + 2 * src_stride), r3 = hn::LoadU(d4, s + 3 * src_stride);
      const auto a = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
      const auto b = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
      const auto e = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
      const auto f = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
      float* t = dst + c * dst_stride + r;
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, a, b)), d4, t);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, a, b)), d4, t + dst_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, e, f)), d4, t + 2 * dst_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, e, f)), d4, t + 3 * dst_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
