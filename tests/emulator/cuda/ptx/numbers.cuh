// Emulated: approximate functions, and arithmetic of packed bf16 and fp16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/ptx/halves.cuh"

namespace deltic::gpu {

// What is below the normal numbers is 0 (.ftz).
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float log2_approx(float x) { return flushed(std::log2(flushed(x))); }
inline float max_or_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y);
}
inline float min_or_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? NAN : std::fmin(x, y);
}

template <class E>
inline uint16_t bits_of(float x) {
  if constexpr (kIsHalf<E>)
    return __half_as_ushort(__float2half_rn(x));
  else
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
inline uint32_t pair_of(uint16_t lo, uint16_t hi) { return uint32_t{hi} << 16 | lo; }
inline uint32_t pack_bf16(float lo, float hi) {
  return pair_of(bits_of<__nv_bfloat16>(lo), bits_of<__nv_bfloat16>(hi));
}
template <class E>
inline uint32_t pack_result(float lo, float hi) {
  return pair_of(bits_of<E>(lo), bits_of<E>(hi));
}
template <class E>
inline uint32_t pack(float lo, float hi) {
  if constexpr (!kIsHalf<E>) return pack_bf16(lo, hi);
  const auto stop = [](float x) {
    return std::isnan(x) ? x : std::fmin(std::fmax(x, -65504.0f), 65504.0f);
  };
  return pack_result<E>(stop(lo), stop(hi));
}
template <class E>
inline uint32_t multiply_packed(uint32_t a, uint32_t b) {
  const float2 x = unpack<E>(a), y = unpack<E>(b);
  return pack_result<E>(x.x * y.x, x.y * y.y);
}
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return pack_bf16(std::fma(bf16_lo(a), bf16_lo(b), bf16_lo(c)),
                   std::fma(bf16_hi(a), bf16_hi(b), bf16_hi(c)));
}

}  // namespace deltic::gpu
