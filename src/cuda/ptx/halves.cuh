// Pairs of bf16 or fp16 in a word, and tf32 as the upper bits of one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace deltic::gpu {

__device__ inline float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ inline float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
// Pairs of operands of type E, bf16 or fp16.
template <class E>
constexpr bool kIsHalf = __is_same(E, __half);
template <class E>
__device__ inline float2 unpack(uint32_t v) {
  if constexpr (!kIsHalf<E>) return make_float2(bf16_lo(v), bf16_hi(v));
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
// To nearest, ties away from zero: the tensor cores drop the low 13 bits. One instruction; cvt.rna
// is three because of infinities, which here may become NaN.
constexpr uint32_t kHalfTf32 = 0x1000u;
__device__ inline uint32_t to_tf32(float x) { return __float_as_uint(x) + kHalfTf32; }

__device__ inline float round_tf32(float x) { return __uint_as_float(to_tf32(x) & 0xffffe000u); }

}  // namespace deltic::gpu
