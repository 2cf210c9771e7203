// (I + L)^-1 of unit lower triangular matrices in shared memory, fp32, in place.
#pragma once

#include "cuda/tile/multiply.cuh"

namespace deltic::gpu {

// A tile of 64 rows: 64 / W matrices of width W below each other. Row r of the tile is `pitch`
// floats from the next; its matrix starts in column (r / W) W where kOnDiagonal, else in column 0.
// The pitch is 4 more than a multiple of 32: then reads of both operands' fragments hit every bank
// once (by rows in pairs twice).
template <int W_, int kPitch_, bool kOnDiagonal_>
struct Triangles {
  static constexpr int W = W_, kPitch = kPitch_;
  static constexpr bool kOnDiagonal = kOnDiagonal_;
  // Where block row i and block column j (16 wide, counted in the tile) lie.
  static __device__ constexpr int at(int i, int j) {
    return 16 * i * kPitch + (kOnDiagonal ? 16 * j : 16 * j % W);
  }
};

// The 16 x 16 block in place, by substitution: a lane has one column. Called by 16 lanes or more;
// reads only below the diagonal.
template <class Tri>
__device__ void solve_column(const float* block, int column, float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      *reinterpret_cast<float4*>(&row[j]) =
          *reinterpret_cast<const float4*>(block + i * Tri::kPitch + j);
    }
    x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= row[j] * x[j];
  }
}

template <class Tri>
__device__ void store_block(float* to, int lane, float factor, const float (&c)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float* at = to + g * Tri::kPitch + 8 * n + 2 * t;
    *reinterpret_cast<float2*>(at) = {factor * c[n][0], factor * c[n][1]};
    *reinterpret_cast<float2*>(at + 8 * Tri::kPitch) = {factor * c[n][2], factor * c[n][3]};
  }
}

// Called by one warp alone (kWarps 1) or by the whole CTA, whose first four warps work (kWarps 4);
// L is in place and visible, and the result is visible to all of them at the end. Blocks above the
// diagonal are not touched.
template <class Tri, int kWarps>
__device__ void invert(float* m, int warp, int lane) {
  static_assert(kWarps == 1 || kWarps == 4);
  const bool works = warp < kWarps;
  const auto sync = [] {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  // Diagonal blocks: one warp has two at a time, of four warps each has one.
  {
    constexpr int kRounds = kWarps == 1 ? 2 : 1;
    float x[kRounds][16];
    const int column = lane % 16;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int block = kWarps == 1 ? 2 * r + lane / 16 : warp;
      if (works) solve_column<Tri>(m + Tri::at(block, block), column, x[r]);
    }
    sync();  // all columns are solved before the block is overwritten
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int block = kWarps == 1 ? 2 * r + lane / 16 : warp;
      float* to = m + Tri::at(block, block) + column;
      if (kWarps == 1 || (works && lane < 16)) {
#pragma unroll
        for (int i = 0; i < 16; ++i) to[i * Tri::kPitch] = x[r][i];
      }
    }
  }
  sync();                        // the diagonal is there
  if constexpr (Tri::W >= 32) {  // 16 -> 32: X10 = -X11 (L10 X00), two of them
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      if (kWarps == 4 && warp != pair) continue;  // a warp each
      const int i = 2 * pair + 1, j = 2 * pair;
      float* corner = m + Tri::at(i, j);
      float s[2][4] = {}, x[2][4] = {};
      multiply_blocks<Tri::kPitch, Tri::kPitch>(corner, m + Tri::at(j, j), lane, s);
      __syncwarp();  // the corner has been read
      store_block<Tri>(corner, lane, 1.0f, s);
      __syncwarp();
      multiply_blocks<Tri::kPitch, Tri::kPitch>(m + Tri::at(i, i), corner, lane, x);
      __syncwarp();
      store_block<Tri>(corner, lane, -1.0f, x);
    }
    sync();  // both are there
  }
  if constexpr (Tri::W == 64) {  // 32 -> 64: the same with blocks (2, 0) to (3, 1)
    constexpr int kMine = 4 / kWarps;
    float c[kMine][2][4] = {};
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      if (!works) continue;
      const int item = n * kWarps + warp, i = 2 + item / 2, j = item % 2;
      for (int k = j; k < 2; ++k)
        multiply_blocks<Tri::kPitch, Tri::kPitch>(m + Tri::at(i, k), m + Tri::at(k, j), lane, c[n]);
    }
    sync();  // L has been read
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      if (!works) continue;
      const int item = n * kWarps + warp;
      store_block<Tri>(m + Tri::at(2 + item / 2, item % 2), lane, 1.0f, c[n]);
#pragma unroll
      for (int e = 0; e < 8; ++e) c[n][e / 4][e % 4] = 0;
    }
    sync();
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      if (!works) continue;
      const int item = n * kWarps + warp, i = 2 + item / 2, j = item % 2;
      for (int k = 2; k <= i; ++k)
        multiply_blocks<Tri::kPitch, Tri::kPitch>(m + Tri::at(i, k), m + Tri::at(k, j), lane, c[n]);
    }
    sync();  // L X00 has been read
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      if (!works) continue;
      const int item = n * kWarps + warp;
      store_block<Tri>(m + Tri::at(2 + item / 2, item % 2), lane, -1.0f, c[n]);
    }
    sync();
  }
}

}  // namespace deltic::gpu
