// Rows moved 16 bytes at a time, where bases and strides allow it.
#pragma once

#include <cuda_pipeline_primitives.h>

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

// Leaves 16 bytes in shared memory behind the program's back: seen after wait and a barrier.
__device__ inline void copy_async(void* to, const void* from) {
  __pipeline_memcpy_async(to, from, 16);
}

}  // namespace deltic::gpu
