// Elements of any float dtype in device code: conversions, and rows loaded lane by lane.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/problem.h"

namespace deltic::gpu {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

// Rounds to nearest even.
template <class E>
__device__ E from_float(float x) {
  if constexpr (sizeof(E) == 4) {
    return x;
  } else if constexpr (__is_same(E, __half)) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Calls f with a null pointer of the element's type. fp64 never comes here: it is refused.
template <class F>
__device__ auto with_dtype(DType type, F&& f) {
  switch (type) {
    case DType::bf16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::f16:
      return f(static_cast<__half*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

// Bytes of a number: size_of() without the branch for bytes, of which kernels have none.
__device__ constexpr int64_t number_bytes(DType t) {
  return t == DType::bf16 || t == DType::f16 ? 2 : t == DType::f32 || t == DType::i32 ? 4 : 8;
}

__device__ inline int64_t offset(const Rows& x, int64_t b, int64_t t, int64_t h) {
  return b * x.sb + t * x.st + h * x.sh;
}

__device__ inline float load(const void* data, DType type, int64_t at) {
  return with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    return to_float(static_cast<const E*>(data)[at]);
  });
}

__device__ inline void store(void* data, DType type, int64_t at, float x) {
  with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    static_cast<E*>(data)[at] = from_float<E>(x);
  });
}

// A row's elements start, start + 32, ... (start: the lane), zeros from `count` on. The dtype is
// looked at once, so that all loads are under way together.
template <int N>
__device__ void load_lanes(const void* data, DType type, int64_t at, int start, int count,
                           float (&out)[N]) {
  with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* row = static_cast<const E*>(data) + at;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int d = start + 32 * i;
      out[i] = d < count ? to_float(row[d]) : 0.0f;
    }
  });
}

// Where element i of a flat parameter of any shape and strides lies.
__device__ inline int64_t param_offset(const Param& x, int64_t i) {
  if (x.contiguous) return i;
  int64_t at = 0;
  for (int32_t d = x.rank - 1; d >= 0; --d) {
    at += (i % x.shape[d]) * x.strides[d];
    i /= x.shape[d];
  }
  return at;
}
__device__ inline float load_param(const Param& x, int64_t i) {
  return load(x.data, x.dtype, param_offset(x, i));
}

__device__ inline int64_t load_index(const Indices& x, int64_t i, int64_t j = 0) {
  const int64_t at = i * x.s0 + j * x.s1;
  return x.is64 ? static_cast<const int64_t*>(x.data)[at] : static_cast<const int32_t*>(x.data)[at];
}

// Over kLanes neighbouring lanes. All lanes of the warp.
template <int kLanes, class Number>
__device__ Number sum_lanes(Number x) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, m);
  return x;
}
__device__ inline float warp_sum(float x) { return sum_lanes<32>(x); }

}  // namespace deltic::gpu
