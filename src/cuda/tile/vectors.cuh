// Rows moved 16 bytes at a time, where bases and strides allow it.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/element.cuh"

namespace deltic::gpu {

// Whether every row of `width` elements can be moved in pieces of 16 bytes. On the host: the
// answer is a kernel's parameter.
inline bool is_vectorizable(const Rows& x, int64_t width) {
  const int64_t n = 16 / size_of(x.dtype);
  return x.present && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.sb % n == 0 &&
         x.st % n == 0 && x.sh % n == 0 && width % n == 0;
}

template <class E>
struct alignas(16) Vector {
  static constexpr int N = 16 / sizeof(E);
  E x[N];
};

// The elements of 16 bytes that came as four words, and back: two instructions and one per pair of
// short ones, where single elements would be moved about first.
template <class E>
__device__ void unpack(const uint4& words, float (&out)[Vector<E>::N]) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) {
      out[i] = __uint_as_float(w[i]);
    } else if constexpr (__is_same(E, __half)) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(w[i]));
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    } else {
      out[2 * i] = __uint_as_float(w[i] << 16);
      out[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
    }
  }
}
template <class E>
__device__ uint4 pack(const float (&x)[Vector<E>::N]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) {
      w[i] = __float_as_uint(x[i]);
    } else if constexpr (__is_same(E, __half)) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      w[i] = reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      w[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

}  // namespace deltic::gpu
