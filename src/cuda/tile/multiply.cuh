// Products of 16 x 16 blocks of fp32 in shared memory.
#pragma once

#include "cuda/ptx/mma.cuh"

namespace deltic::gpu {

// c += a b, by a warp. c[n]: columns 8 n and up, as the matrix instruction lays them out. Pitches
// that are 4 more than a multiple of 32 let b's reads hit every bank once.
template <int kPitchA, int kPitchB>
__device__ void multiply_blocks(const float* a, const float* b, int lane, float (&c)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    // Slots t and t + 4 of the product are columns 2 t and 2 t + 1 here, on both sides.
    const float2 upper = *reinterpret_cast<const float2*>(a + g * kPitchA + k + 2 * t);
    const float2 lower = *reinterpret_cast<const float2*>(a + (g + 8) * kPitchA + k + 2 * t);
    const Split fa[4] = {split(upper.x), split(lower.x), split(upper.y), split(lower.y)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* column = b + (k + 2 * t) * kPitchB + 8 * n + g;
      mma_3xtf32(c[n], fa, {split(column[0]), split(column[kPitchB])});
    }
  }
}

}  // namespace deltic::gpu
