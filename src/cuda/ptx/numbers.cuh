// Approximate functions, packed bf16 and fp16, tf32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace deltic::gpu {

__device__ inline float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ inline float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ inline float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
// Pairs of operands of type E, bf16 or fp16.
template <class E>
constexpr bool kIsHalf = __is_same(E, __half);
// Rounded. fp16 operands stop at 65504 instead of becoming infinite, which costs nothing.
template <class E>
__device__ inline uint32_t pack(float lo, float hi) {
  if constexpr (!kIsHalf<E>) return pack_bf16(lo, hi);
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// The same for results.
template <class E>
__device__ inline uint32_t pack_result(float lo, float hi) {
  if constexpr (!kIsHalf<E>) return pack_bf16(lo, hi);
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class E>
__device__ inline float2 unpack(uint32_t v) {
  if constexpr (!kIsHalf<E>) return make_float2(bf16_lo(v), bf16_hi(v));
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
template <class E>
__device__ inline uint32_t multiply_packed(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (kIsHalf<E>)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// To nearest, ties away from zero: the tensor cores drop the low 13 bits. One instruction; cvt.rna
// is three because of infinities, which here may become NaN.
constexpr uint32_t kHalfTf32 = 0x1000u;
__device__ inline uint32_t to_tf32(float x) { return __float_as_uint(x) + kHalfTf32; }

__device__ inline float round_tf32(float x) { return __uint_as_float(to_tf32(x) & 0xffffe000u); }

}  // namespace deltic::gpu
