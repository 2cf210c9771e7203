// Matrix instructions of a warp (sm_80 and later), 16 x 8 outputs, fp32 sums.
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

// 16 x 8 x 8; operands are cut to tf32 by the unit (the low 13 bits are not read).
__device__ inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                                float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
        "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

}  // namespace deltic::gpu
