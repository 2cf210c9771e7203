// Scores and the inverse of a chunk with gates per head, or none: scores by a warpgroup, the
// inverse as a tile by a warp.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk/invert.cuh"

namespace deltic::gpu::chunk {

struct alignas(128) HeadScores {
  union {
    float l[10 * 16 * kBlockPitch];  // L, then its inverse: blocks of 16 x 16 (Stairs)
    uint8_t tile[kHalfBytes];        // then T, until the copy out has read it
  };
  float g_sum[kChunk];    // cumulative log2 decay
  float beta[kChunk];     // 0 past the end
  float k_scale[kChunk];  // 1/|k|
  float q_scale[kChunk];  // scale/|q|
  float column[kChunk];   // cumulative log2 decay and log2 |k|: a column's exponent, negative
};

// k (k, q)^T, under way on return. One product of twice the columns reads k once for both, and
// gives every warp five blocks of 16 x 16: those of k k^T up to the diagonal, those of k q^T from
// it on.
template <class E>
__device__ inline void multiply_pairs(const uint8_t* tiles, float (&pairs)[64]) {
  const uint64_t k = tile_desc(smem_u32(tiles), 16, 1024);
  fence_operands(pairs);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const uint64_t at = desc_at(k, (j / 4) * 2 * kHalfBytes + (j % 4) * 32);
    wgmma<E, Major::k, Major::k>(pairs, at, at, j > 0);
  }
  wgmma_commit();
}

// One half of it: k k^T (0) or k q^T (1), for those who have registers for one at a time.
template <class E>
__device__ inline void multiply_keys(const uint8_t* tiles, int half, float (&pairs)[32]) {
  // Read anew: else the descriptors of the first half are kept for the second.
  const uint64_t k = tile_desc(uint32_t(opaque(int(smem_u32(tiles)))), 16, 1024);
  fence_operands(pairs);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const uint32_t at = (j / 4) * 2 * kHalfBytes + (j % 4) * 32;
    wgmma<E, Major::k, Major::k>(pairs, desc_at(k, at), desc_at(k, at + half * kHalfBytes), j > 0);
  }
  wgmma_commit();
}

// Rows past the sequence's end belong to someone else: zeros instead. All threads.
__device__ inline void clear_tail(uint8_t* tiles, int tokens_left, int barrier) {
  const int tid = thread_index() % kWarpgroup, row = tid / 2;
  if (row >= tokens_left)
#pragma unroll
    for (int i = 0; i < 16; i++)
      *reinterpret_cast<uint4*>(tiles + (i / 4) * kHalfBytes + row * 128 + 64 * (tid % 2) +
                                16 * (i % 4)) = uint4{0, 0, 0, 0};
  fence_async_proxy();
  named_sync(barrier, kWarpgroup);  // the tiles are clean
}

// |q|^2 of the warp's 16 tokens; use(token, square) runs in the lane that has it.
template <class E, class Use>
__device__ inline void query_squares(const uint8_t* tiles, int warp, const Lane& ln, Use use) {
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    const int slab = 2 * warp + i;
    const uint32_t base = (8 * slab + ln.id % 8) * 128;
    float xx[4] = {};
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t x[4];
      ldmatrix_x4(x, smem_u32(tiles) + base + (2 * (n >> 1) + 1) * kHalfBytes +
                         (((4 * (n & 1) + ln.id / 8) ^ (ln.id % 8)) << 4));
#pragma unroll
      for (int j = 0; j < 4; j += 2) mma_pairs<E>(xx, x[j], 0, x[j + 1], 0, x[j], x[j + 1]);
    }
    if (ln.x == ln.g >> 1) use(8 * slab + ln.g, ln.g & 1 ? xx[1] : xx[0]);
  }
}

// Of the warp's tokens, from the diagonal of k k^T: 1/|k|, and the columns' exponents.
template <int N>
__device__ inline void put_norms(HeadScores& s, int tokens_left, const float (&pairs)[N]) {
  const int tid = thread_index() % kWarpgroup, warp = tid / 32;
  const Lane ln(tid);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++)
      if (w == warp) x = ln.g & 1 ? pairs[8 * w + 6 * i + 1] : pairs[8 * w + 6 * i];
    const int token = 16 * warp + 8 * i + ln.g;
    x = token < tokens_left ? x + 1e-6f : 1.f;
    if (ln.x == ln.g >> 1) {
      s.k_scale[token] = rsqrtf(x);
      s.column[token] = s.g_sum[token] + .5f * log2_approx(x);
    }
  }
}

// The accumulators of the blocks after the first ones in these' place.
template <int kFirst, int N>
__device__ inline void shift_blocks(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < 8 * (4 - kFirst); i++) x[N - 32 + i] = x[N - 32 + i + 8 * kFirst];
}
// M beta to its place: k k^T with decays and norms, as operands left of the diagonal's blocks. Warp
// a has the rows of block row a. kBlocks of them at a time, by the same instructions: those of all
// roles should stay in the SM's instruction cache (32 KB or so). All loads of these come before the
// first store, so that none waits for one.
template <int kBlocks, int N>
__device__ inline void put_keys(HeadScores& s, float (&kk)[N]) {
  const int warp = thread_index() % kWarpgroup / 32;
  const Lane ln(thread_index());
  float row[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = 16 * warp + 8 * i + ln.g;
    row[i] = 2.f * s.g_sum[r] - s.column[r];
  }
#pragma unroll 1
  for (int first = 0; first < 4; first += kBlocks) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (first + b > warp) break;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = 16 * (first + b) + 8 * j + 2 * ln.x;
        const float2 beta = *reinterpret_cast<const float2*>(&s.beta[col]);
        const float2 c = *reinterpret_cast<const float2*>(&s.column[col]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float* const x = &kk[8 * b + 4 * j + 2 * i];
          x[0] *= exp2_approx(row[i] - c.x) * beta.x, x[1] *= exp2_approx(row[i] - c.y) * beta.y;
        }
      }
      if (first + b == warp)
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const int below =
              8 * (n % 2) + ln.g - (8 * (n / 2) + 2 * ln.x);  // the first column's row
          float* const x = &kk[8 * b + 2 * n];
          x[0] = below > 0 ? x[0] : 0.f, x[1] = below > 1 ? x[1] : 0.f;
        }
    }
    constexpr int P = Stairs::P;
    float* const l = &s.l[Stairs::at(warp, first) + ln.g * P + 2 * ln.x];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (first + b > warp) break;
      const uint32_t half = first + b < warp ? kHalfTf32 : 0u;  // operands are rounded (to_tf32)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float* const x = &kk[8 * b + 2 * n];
        *reinterpret_cast<uint2*>(l + 16 * P * b + 8 * (n % 2) * P + 8 * (n / 2)) =
            make_uint2(__float_as_uint(x[0]) + half, __float_as_uint(x[1]) + half);
      }
    }
    shift_blocks<kBlocks>(kk);
  }
}
// Aqk to the packet, from its transpose: warp a has the columns of block column a.
template <class E, int kBlocks, int N>
__device__ inline void put_queries(const HeadScores& s, uint8_t* tile, float (&pairs)[N]) {
  const int warp = thread_index() % kWarpgroup / 32;
  const Lane ln(thread_index());
  const float* const columns = &s.column[16 * warp + ln.g];
  const float column[2] = {columns[0], columns[8]};
  const uint32_t out = smem_u32(tile) + (ln.id / 16 * 8 + ln.id % 8) * 128 +
                       (((2 * warp + ln.id / 8 % 2) ^ (ln.id % 8)) << 4);
#pragma unroll 1
  for (int first = 0; first < 4; first += kBlocks) {
    uint32_t aqk[4 * kBlocks];
#pragma unroll
    for (int b = kBlocks - 1; b >= 0; b--) {
      if (first + b < warp) break;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = 16 * (first + b) + 8 * j + 2 * ln.x;
        const float2 sq = *reinterpret_cast<const float2*>(&s.q_scale[row]);
        const float2 g = *reinterpret_cast<const float2*>(&s.g_sum[row]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float* const qk = &pairs[N - 32 + 8 * b + 4 * j + 2 * i];
          float x = qk[0] * (exp2_approx(g.x - column[i]) * sq.x);
          float y = qk[1] * (exp2_approx(g.y - column[i]) * sq.y);
          if (first + b == warp) {
            const int below = 8 * j + 2 * ln.x - (8 * i + ln.g);  // the first row's column
            x = below >= 0 ? x : 0.f, y = below >= -1 ? y : 0.f;
          }
          aqk[4 * b + 2 * j + i] = pack<E>(x, y);
        }
      }
    }
#pragma unroll
    for (int b = kBlocks - 1; b >= 0; b--) {
      if (first + b < warp) break;
      stmatrix_x4_trans(out + (first + b) * 2048,
                        *reinterpret_cast<const uint32_t(*)[4]>(&aqk[4 * b]));
    }
    shift_blocks<kBlocks>(pairs);
  }
}

// --- the inverse ---------------------------------------------------------------------------------
// A 16 x 16 block of the tile; r: pairs in the order of the accumulators.
__device__ inline void put_block(uint8_t* tile, int i, int j, const Lane& ln,
                                 const uint32_t (&r)[4]) {
  stmatrix_x4(smem_u32(tile) + swizzled(16 * i + ln.id % 16, 2 * j + ln.id / 16), r);
}
// Blocks above the diagonal's.
__device__ inline void clear_upper(uint8_t* tile, const Lane& ln) {
  const uint32_t zero[4] = {};
#pragma unroll
  for (int i = 0; i < 3; i++)
#pragma unroll
    for (int j = i + 1; j < 4; j++) put_block(tile, i, j, ln, zero);
}
// Block of the inverse, as operands: pairs in the order of the accumulators.
template <class E>
__device__ inline void load_operands(const float* block, const Lane& ln, uint32_t (&r)[4]) {
  const Block b = load_block<Stairs::P>(block, ln);
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = pack<E>(b.m[i / 2][2 * (i % 2)], b.m[i / 2][2 * (i % 2) + 1]);
}
// T in place of the inverse, which is in the place of L.
template <class E>
__device__ inline void put_solved(HeadScores& s, const Lane& ln) {
  uint32_t r[10][4];
#pragma unroll
  for (int n = 0; n < 10; n++) load_operands<E>(s.l + 16 * Stairs::P * n, ln, r[n]);
  __syncwarp();  // the inverse has been read
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j <= i; j++) put_block(s.tile, i, j, ln, r[i * (i + 1) / 2 + j]);
  clear_upper(s.tile, ln);
}
// The same by two warps, each has every other block; sync(): a barrier of the two.
template <class E, class Sync>
__device__ inline void put_solved_by_two(HeadScores& s, int half, const Lane& ln, Sync sync) {
  uint32_t r[5][4];
#pragma unroll
  for (int n = 0; n < 5; n++) load_operands<E>(s.l + 16 * Stairs::P * (2 * n + half), ln, r[n]);
  sync();  // the inverse has been read
  const uint32_t zero[4] = {};
#pragma unroll
  for (int n = 0; n < 5; n++) {
    constexpr int kRow[10] = {0, 1, 1, 2, 2, 2, 3, 3, 3, 3},
                  kColumn[10] = {0, 0, 1, 0, 1, 2, 0, 1, 2, 3};
    put_block(s.tile, half ? kRow[2 * n + 1] : kRow[2 * n],
              half ? kColumn[2 * n + 1] : kColumn[2 * n], ln, r[n]);
  }
#pragma unroll
  for (int n = 0; n < 3; n++) {
    constexpr int kRow[6] = {0, 0, 0, 1, 1, 2}, kColumn[6] = {1, 2, 3, 2, 3, 3};
    put_block(s.tile, half ? kRow[2 * n + 1] : kRow[2 * n],
              half ? kColumn[2 * n + 1] : kColumn[2 * n], ln, zero);
  }
}

}  // namespace deltic::gpu::chunk
