// Matrix instructions of a warp (sm_80 and later), 16 x 8 outputs, fp32 sums.
//
// Fragments here hold four neighbouring channels of one row per lane: row lane / 4 of eight,
// channels 4 (lane % 4) .. + 3 of sixteen. The order of channels inside of a product is free as
// long as both factors agree, so this layout is a factor's upper or lower eight rows and, at the
// same time, the other factor's eight columns: rows are loaded once and used as either.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/numbers.cuh"

namespace deltic::gpu {

// d += a b: 16 x 8 x 16, words of two bf16 or fp16. Rows 0..7 of a are (k_lo, k_hi), rows 8..15
// (q_lo, q_hi); lo / hi are contraction indices 0..7 / 8..15.
template <class E>
__device__ inline void mma_pairs(float (&d)[4], uint32_t k_lo, uint32_t q_lo, uint32_t k_hi,
                                 uint32_t q_hi, uint32_t b_lo, uint32_t b_hi) {
  if constexpr (kIsHalf<E>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(k_lo), "r"(q_lo), "r"(k_hi), "r"(q_hi), "r"(b_lo), "r"(b_hi));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(k_lo), "r"(q_lo), "r"(k_hi), "r"(q_hi), "r"(b_lo), "r"(b_hi));
}

// The same with eight contraction indices.
template <class E>
__device__ inline void mma_half(float (&d)[4], uint32_t upper, uint32_t lower, uint32_t b) {
  if constexpr (kIsHalf<E>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(upper), "r"(lower), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(upper), "r"(lower), "r"(b));
}
// An 8 x 8 matrix of a warp turned: a lane has two neighbours of row lane / 4.
__device__ inline uint32_t transpose_pairs(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// The same: a, upper and lower eight rows; b, eight columns.
struct alignas(8) HalfFragment {
  uint32_t x[2];
};

template <class E>
__device__ void mma(float (&c)[4], const HalfFragment& upper, const HalfFragment& lower,
                    const HalfFragment& b) {
  mma_pairs<E>(c, upper.x[0], lower.x[0], upper.x[1], lower.x[1], b.x[0], b.x[1]);
}

// 16 x 8 x 8; operands are cut to tf32 by the unit (the low 13 bits are not read).
__device__ inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                                float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
        "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
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
__device__ inline void mma_tf32(float (&c)[4], const FloatFragment& upper,
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
