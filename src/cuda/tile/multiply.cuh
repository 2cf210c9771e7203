// Products of 16 x 16 blocks of fp32 in shared memory.
#pragma once

#include "cuda/ptx/fragments.cuh"

namespace deltic::gpu {

// c += a b, by a warp. c[n]: columns 8 n and up, as the matrix instruction lays them out. Pitches
// that are 4 more than a multiple of 32 let b's reads, and those of a turned a, hit every bank
// once. kTurnA, kTurnB: the transpose of the block in memory is the operand. kShortA, kShortB: it
// has no more digits than tf32 (it came as bf16 or fp16), so its low part is zero.
template <int kPitchA, int kPitchB, bool kTurnA = false, bool kTurnB = false, bool kShortA = false,
          bool kShortB = false>
__device__ void multiply_blocks(const float* a, const float* b, int lane, float (&c)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    // Slots t and t + 4 of the product are columns 2 t and 2 t + 1 here, on both sides.
    float2 upper, lower;
    if constexpr (kTurnA) {
      const float* row = a + (k + 2 * t) * kPitchA + g;
      upper = {row[0], row[kPitchA]}, lower = {row[8], row[kPitchA + 8]};
    } else {
      upper = *reinterpret_cast<const float2*>(a + g * kPitchA + k + 2 * t);
      lower = *reinterpret_cast<const float2*>(a + (g + 8) * kPitchA + k + 2 * t);
    }
    const Split fa[4] = {split(upper.x), split(lower.x), split(upper.y), split(lower.y)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 y;
      if constexpr (kTurnB) {
        y = *reinterpret_cast<const float2*>(b + (8 * n + g) * kPitchB + k + 2 * t);
      } else {
        const float* column = b + (k + 2 * t) * kPitchB + 8 * n + g;
        y = {column[0], column[kPitchB]};
      }
      if constexpr (kShortA && kShortB) {
        mma_tf32(c[n], upper.x, lower.x, upper.y, lower.y, y.x, y.y);
      } else if constexpr (kShortA) {
        const Split fb[2] = {split(y.x), split(y.y)};
        mma_tf32(c[n], upper.x, lower.x, upper.y, lower.y, fb[0].low, fb[1].low);
        mma_tf32(c[n], upper.x, lower.x, upper.y, lower.y, fb[0].high, fb[1].high);
      } else if constexpr (kShortB) {
        mma_tf32(c[n], fa[0].low, fa[1].low, fa[2].low, fa[3].low, y.x, y.y);
        mma_tf32(c[n], fa[0].high, fa[1].high, fa[2].high, fa[3].high, y.x, y.y);
      } else {
        mma_3xtf32(c[n], fa, {split(y.x), split(y.y)});
      }
    }
  }
}

}  // namespace deltic::gpu
