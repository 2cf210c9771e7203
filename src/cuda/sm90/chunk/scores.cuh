// Scores of a chunk with gates per channel: diagonals, the levels' products to their places, the
// inverse as a tile. By a warpgroup; lane = 4 g + x as in the accumulators of mma: rows g, g + 8,
// columns 2x, 2x + 1.
#pragma once

#include <cstddef>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk/invert.cuh"

namespace deltic::gpu::chunk {

struct Scores {
  union {
    float l[kChunk * kPitch];  // L, then its inverse block by block in place
    uint8_t tile[kHalfBytes];  // then T, until the copy out has read it
  };
  uint8_t aqk[kHalfBytes];  // above the diagonal zero
  float row_scale[kChunk];  // beta/|k|^2: of columns of L; fp16: of rows, and of T's columns
  float v_scale[kChunk];    // |k|
  float k_scale[kChunk];    // 1/|k|; fp16
  float o_scale[kChunk];    // scale/|q|
  float diagonal[kChunk];   // of Aqk

  // Factors of entries of L and Aqk.
  template <class E>
  __device__ float l_factor(int row, int col) const {
    return row_scale[kIsHalf<E> ? row : col];
  }
  template <class E>
  __device__ float aqk_factor(int, int col) const {
    return kIsHalf<E> ? k_scale[col] : 1.f;
  }
};
static_assert(offsetof(Scores, aqk) % 128 == 0 && sizeof(Scores) % 128 == 0, "put_local_level");

// Diagonals of k k^T, q q^T and q k^T of the warp's 16 tokens; use(token, kk, qq, qk) runs in the
// lane that has the token's. kHalves: of 64 channels.
template <class E, int kHalves = 2, class Use>
__device__ inline void token_diagonals(const uint8_t* k_tile, const uint8_t* q_tile, int warp,
                                       const Lane& ln, Use use) {
#pragma unroll 1  // instructions of all roles together should stay in the SM's cache
  for (int i = 0; i < 2; i++) {
    const int slab = 2 * warp + i;
    const uint32_t base = (8 * slab + ln.id % 8) * 128;
    float kq[4] = {}, qq[4] = {};
#pragma unroll
    for (int n = 0; n < 2 * kHalves; n++) {
      const uint32_t at =
          base + (n >> 1) * kHalfBytes + (((4 * (n & 1) + ln.id / 8) ^ (ln.id % 8)) << 4);
      uint32_t k[4], q[4];
      ldmatrix_x4(k, smem_u32(k_tile) + at);
      ldmatrix_x4(q, smem_u32(q_tile) + at);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        mma_pairs<E>(kq, k[j], q[j], k[j + 1], q[j + 1], k[j], k[j + 1]);
        mma_pairs<E>(qq, q[j], 0, q[j + 1], 0, q[j], q[j + 1]);
      }
    }
    // The diagonal of 8 x 8 lies in lane 4 g + g / 2.
    const int n = ln.g & 1;
    if (ln.x == ln.g >> 1)
      use(8 * slab + ln.g, n ? kq[1] : kq[0], n ? qq[1] : qq[0], n ? kq[3] : kq[2]);
  }
}

// Two scores of adjacent columns: to L (warps 0, 1), or to Aqk (warps 2, 3), with their factors.
template <class E, class S>
__device__ inline void put_pair(S& s, bool is_q, int row, int col, float a, float b) {
  if (is_q) {
    a *= s.template aqk_factor<E>(row, col), b *= s.template aqk_factor<E>(row, col + 1);
    *reinterpret_cast<uint32_t*>(s.aqk + swizzled(row, col / 8) + 2 * (col % 8)) = pack<E>(a, b);
  } else {
    put_operand(&s.l[row * kPitch + col], a * s.template l_factor<E>(row, col),
                b * s.template l_factor<E>(row, col + 1));
  }
}

// What a level owns of its 64 x 32 product (32 rows k, 32 rows q), selected, to its place. Levels
// of 1 to 8 tokens (log2 0 to 3): four 8 x 8 blocks on the diagonal, one for each 16 tokens, and in
// these blocks of the level's own size.
template <class E, class S>
__device__ inline void put_local_level(S& s, const float (&acc)[16], int log2, int warp,
                                       const Lane& ln) {
  const bool is_q = warp >= 2;
  const int upper = warp & 1, low = (1 << log2) - 1;  // upper: rows 16 .. 31
  const int row = 32 * upper + 2 * (ln.g & ~low) + low + 1 + (ln.g & low);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int c = 2 * ln.x + n, col = 32 * upper + 2 * (c & ~low) + (c & low);
    const uint32_t aqk = smem_u32(s.aqk) + row * 128 + ((2 * col) ^ ((row & 7) << 4));
    const uint32_t l = smem_u32(s.l) + row * (4 * kPitch) + 4 * col;
#pragma unroll
    for (int i = 0; i < 2; i++) {  // 16 tokens on: in aqk bit 5, which neither base nor swizzle has
      float a = upper ? acc[8 + 6 * i + n] : acc[6 * i + n];
      a *= is_q ? s.template aqk_factor<E>(16 * i + row, 16 * i + col)
                : s.template l_factor<E>(16 * i + row, 16 * i + col);
      if ((ln.g ^ c) <= low) {
        if (is_q)
          store_shared_u16((aqk ^ (32 * i)) + 2048 * i, uint16_t(pack<E>(a, 0.f)));
        else
          store_shared_f32(l + i * (64 * kPitch + 64), a);
      }
    }
  }
}
template <class E, class S>
__device__ inline void put_level16(S& s, const float (&acc)[16], int warp, const Lane& ln) {
  const int upper = warp & 1;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = 4 * j + 2 * i;
      put_pair<E>(s, warp >= 2, 32 * upper + 16 + 8 * i + ln.g, 32 * upper + 8 * j + 2 * ln.x,
                  upper ? acc[8 + at] : acc[at], upper ? acc[8 + at + 1] : acc[at + 1]);
    }
}
// N: half of the product's columns, from `first` on.
template <class E, class S, int N>
__device__ inline void put_level32(S& s, const float (&acc)[N], int warp, const Lane& ln,
                                   int first = 0) {
#pragma unroll
  for (int j = 0; j < N / 4; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      put_pair<E>(s, warp >= 2, 32 + 16 * (warp & 1) + 8 * i + ln.g, first + 8 * j + 2 * ln.x,
                  acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
}

// T (fp16: with its scales, of rows and columns) as a tile in the inverse's place; zeros above the
// diagonal. The barrier is one that the race checker knows: at a named one it sometimes reports
// these reads and writes (bench/probes/racecheck).
template <class E>
__device__ inline void put_inverse(Scores& s, uint64_t* read, int parity) {
  const int tid = thread_index() % kWarpgroup, col = 4 * (tid % 16);
  uint2 packed[8];
  float4 c = make_float4(1.f, 1.f, 1.f, 1.f);
  if constexpr (kIsHalf<E>) {
    const float4 v = *reinterpret_cast<const float4*>(&s.v_scale[col]);
    c = *reinterpret_cast<const float4*>(&s.row_scale[col]);
    c.x *= v.x, c.y *= v.y, c.z *= v.z, c.w *= v.w;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == 4) compiler_fence();                        // all eight loads at once would spill
    const int row = 8 * i + tid / 16, left = row - col;  // columns up to the diagonal, less one
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
    if (left >= 0) a = *reinterpret_cast<const float4*>(&s.l[row * kPitch + col]);
    if constexpr (kIsHalf<E>) {
      const float v = s.v_scale[row];
      a.x *= v, a.y *= v, a.z *= v, a.w *= v;
    }
    const float x = a.x * c.x, y = left >= 1 ? a.y * c.y : 0.f;
    const float z = left >= 2 ? a.z * c.z : 0.f, w = left >= 3 ? a.w * c.w : 0.f;
    packed[i] = make_uint2(pack<E>(x, y), pack<E>(z, w));
  }
  barrier_arrive(read);
  barrier_wait(read, parity);  // all of the inverse has been read
#pragma unroll
  for (int i = 0; i < 8; i++)
    *reinterpret_cast<uint2*>(s.tile + swizzled(8 * i + tid / 16, col / 8) + 2 * (col % 8)) =
        packed[i];
}

}  // namespace deltic::gpu::chunk
