// Factors of a warp's matrix instructions, as lanes hold them.
//
// Fragments here hold four neighbouring channels of one row per lane: row lane / 4 of eight,
// channels 4 (lane % 4) .. + 3 of sixteen. The order of channels inside of a product is free as
// long as both factors agree, so this layout is a factor's upper or lower eight rows and, at the
// same time, the other factor's eight columns: rows are loaded once and used as either.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"

namespace deltic::gpu {

// a: upper and lower eight rows; b, eight columns.
struct alignas(8) HalfFragment {
  uint32_t x[2];
};

template <class E>
__device__ void mma(float (&c)[4], const HalfFragment& upper, const HalfFragment& lower,
                    const HalfFragment& b) {
  mma_pairs<E>(c, upper.x[0], lower.x[0], upper.x[1], lower.x[1], b.x[0], b.x[1]);
}

// A number as the sum of two tf32 numbers, to 2^-21.
struct Split {
  float high, low;
};
__device__ inline Split split(float x) {
  const float high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
  return {high, x - high};
}

// fp32 factors as three products of tf32: the product of the low parts, 2^-22, is left out.
__device__ inline void mma_3xtf32(float (&c)[4], const Split (&a)[4], const Split (&b)[2]) {
  mma_tf32(c, a[0].low, a[1].low, a[2].low, a[3].low, b[0].high, b[1].high);
  mma_tf32(c, a[0].high, a[1].high, a[2].high, a[3].high, b[0].low, b[1].low);
  mma_tf32(c, a[0].high, a[1].high, a[2].high, a[3].high, b[0].high, b[1].high);
}

struct alignas(16) FloatFragment {
  float x[4];
};

// With operands cut to tf32: off by 2^-11 of themselves at most.
__device__ inline void mma_1xtf32(float (&c)[4], const FloatFragment& upper,
                                  const FloatFragment& lower, const FloatFragment& b) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    mma_tf32(c, upper.x[i], lower.x[i], upper.x[i + 1], lower.x[i + 1], b.x[i], b.x[i + 1]);
  }
}
__device__ inline void mma_3xtf32(float (&c)[4], const FloatFragment& upper,
                                  const FloatFragment& lower, const FloatFragment& b) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    mma_3xtf32(c,
               {split(upper.x[i]), split(lower.x[i]), split(upper.x[i + 1]), split(lower.x[i + 1])},
               {split(b.x[i]), split(b.x[i + 1])});
  }
}

// d (16 x 8) += a (16 x 8) b (8 x 8), operands rounded before; contraction index 2x, 2x + 1 of lane
// x stands for x, x + 4, in both operands, so that an accumulator is an operand as it stands.
__device__ inline void mma_accumulator_tf32(float (&d)[4], const float (&a)[4], float b0,
                                            float b1) {
  mma_tf32(d, a[0], a[2], a[1], a[3], b0, b1);
}

}  // namespace deltic::gpu
