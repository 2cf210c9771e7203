// (I + L)^-1 of a chunk in shared memory: 8 x 8 blocks on the diagonal by substitution in fp32,
// then T21 = -(T22 L21) T11 for blocks of 8, 16 and 32 on the tensor cores (tf32). Lane = 4 g + x
// as in the accumulators of mma: rows g, g + 8, columns 2x, 2x + 1. L's 16 x 16 blocks below the
// diagonal come as operands, rounded (put_operand); those of the inverse stay so.
#pragma once
#include "cuda/ptx/async.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

struct Lane {
  int id, g, x;
  __device__ explicit Lane(int tid) : id(tid % 32), g(id / 4), x(id % 4) {}
};

// Two neighbours as operands of products alone.
__device__ inline void put_operand(float* p, float x, float y) {
  *reinterpret_cast<uint2*>(p) = make_uint2(to_tf32(x), to_tf32(y));
}
// A 16 x 16 block as two operands or accumulators of 16 x 8.
struct Block {
  float m[2][4];
};
__device__ inline Block load_block(const float* p, const Lane& ln) {
  Block b;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 f =
          *reinterpret_cast<const float2*>(p + (8 * i + ln.g) * kPitch + 8 * j + 2 * ln.x);
      b.m[j][2 * i] = f.x, b.m[j][2 * i + 1] = f.y;
    }
  return b;
}
__device__ inline void store_negative(float* p, const Block& b, const Lane& ln) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<float2*>(p + (8 * i + ln.g) * kPitch + 8 * j + 2 * ln.x) =
          make_float2(round_tf32(-b.m[j][2 * i]), round_tf32(-b.m[j][2 * i + 1]));
}
// d += a b, b in shared memory.
__device__ inline void multiply(Block& d, const Block& a, const float* b, const Lane& ln) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float* p = b + (8 * k + 2 * ln.x) * kPitch + 8 * j + ln.g;
      mma_tf32(d.m[j], a.m[k], p[0], p[kPitch]);
    }
}
// An accumulator as operand.
__device__ inline void round_block(Block& b) {
#pragma unroll
  for (int i = 0; i < 8; i++) b.m[i / 4][i % 4] = __uint_as_float(to_tf32(b.m[i / 4][i % 4]));
}
__device__ inline float* block_at(float* l, int i, int j) { return l + 16 * i * kPitch + 16 * j; }

// One warp: the inverse of the 32 x 32 block on the diagonal, in place. A lane holds a column of
// one of four 8 x 8 blocks. kClears: what lies above the diagonal of L has not been cleared.
template <bool kClears>
__device__ inline void invert_half(float* l, const Lane& ln) {
  {
    float* const block = l + ln.id / 8 * 8 * (kPitch + 1);
    const int c = ln.id % 8;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
      float sum = c == r ? 1.f : 0.f, odd = 0.f;
#pragma unroll
      for (int i = 0; i < r; i += 4) {
        const float4 row = *reinterpret_cast<const float4*>(block + r * kPitch + i);
        sum -= row.x * x[i];
        if (i + 1 < r) odd -= row.y * x[i + 1];
        if (i + 2 < r) sum -= row.z * x[i + 2];
        if (i + 3 < r) odd -= row.w * x[i + 3];
      }
      x[r] = sum + odd;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; r++) {
      block[r * kPitch + c] = round_tf32(x[r]);
      if (kClears && ln.id & 8) block[(r - 8) * kPitch + c] = 0.f;
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < 2; i++) {  // 16 x 16, rows 8 to 15 of the products are empty
    float* const upper = block_at(l, i, i);
    float* const lower = upper + 8 * kPitch;
    const float2 f = *reinterpret_cast<const float2*>(lower + 8 + ln.g * kPitch + 2 * ln.x);
    const float* const b = lower + 2 * ln.x * kPitch + ln.g;
    const float* const c = upper + 2 * ln.x * kPitch + ln.g;
    float y[4] = {}, z[4] = {};
    mma_tf32(y, {f.x, f.y, 0.f, 0.f}, round_tf32(b[0]), round_tf32(b[kPitch]));
    mma_tf32(z, {round_tf32(y[0]), round_tf32(y[1]), 0.f, 0.f}, c[0], c[kPitch]);
    __syncwarp();  // L has been read
    *reinterpret_cast<float2*>(lower + ln.g * kPitch + 2 * ln.x) =
        make_float2(round_tf32(-z[0]), round_tf32(-z[1]));
  }
  __syncwarp();
  Block y = {}, z = {};
  multiply(y, load_block(block_at(l, 1, 1), ln), block_at(l, 1, 0), ln);
  round_block(y);
  multiply(z, y, block_at(l, 0, 0), ln);
  __syncwarp();
  store_negative(block_at(l, 1, 0), z, ln);
}
// Warps 0 and 1: rows of blocks 3 and 2 of the lower left 32 x 32, negative, from L and the
// inverses of both halves. One code and loops: instructions of all roles together should stay in
// the SM's cache (32 KB or so).
__device__ inline void invert_corner(float* l, int row, const Lane& ln, Block (&z)[2]) {
  Block y[2] = {};
#pragma unroll 1
  for (int k = 2; k <= row; k++) {
    const Block a = load_block(block_at(l, row, k), ln);
    multiply(y[0], a, block_at(l, k, 0), ln);
    multiply(y[1], a, block_at(l, k, 1), ln);
  }
  round_block(y[0]), round_block(y[1]);
  z[0] = z[1] = {};
  multiply(z[0], y[0], block_at(l, 0, 0), ln);
  multiply(z[0], y[1], block_at(l, 1, 0), ln);
  multiply(z[1], y[1], block_at(l, 1, 1), ln);
}
// All of it in place. Three warps; the fourth loads meanwhile. barrier: of 96 threads.
__device__ inline void invert_in_place(float* l, int barrier) {
  const int warp = thread_index() % 128 / 32;
  const Lane ln(thread_index());
  if (warp < 2) invert_half<true>(block_at(l, 2 * warp, 2 * warp), ln);
  named_sync(barrier, 96);
  Block z[2];
  if (warp < 2) invert_corner(l, 3 - warp, ln, z);
  named_sync(barrier, 96);  // L of the lower half has been read
  if (warp < 2) {
    store_negative(block_at(l, 3 - warp, 0), z[0], ln);
    store_negative(block_at(l, 3 - warp, 1), z[1], ln);
  }
}

}  // namespace deltic::gpu::forward
