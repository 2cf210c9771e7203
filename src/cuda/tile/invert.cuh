// (I + L)^-1 of unit lower triangular matrices in shared memory by a CTA, fp32, in place. By one
// warp alone: invert_warp.cuh.
#pragma once

#include "cuda/tile/multiply.cuh"

namespace deltic::gpu {

// A tile of 64 rows: 64 / W matrices of width W below each other. Row r of the tile is `pitch`
// floats from the next; its matrix starts in column (r / W) W. The pitch is 4 more than a multiple
// of 32: then reads of both operands' fragments hit every bank once (by rows in pairs twice).
template <int W_, int kPitch_>
struct Triangles {
  static constexpr int W = W_, kPitch = kPitch_;
  // Where block row i and block column j (16 wide, counted in the tile) lie.
  static __device__ constexpr int at(int i, int j) { return 16 * i * kPitch + 16 * j; }
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

// Called by a CTA of four warps; L is in place and visible, and the result is visible to all of
// them at the end. Blocks above the diagonal are not touched.
template <class Tri>
__device__ void invert(float* m, int warp, int lane) {
  // Diagonal blocks: a warp each.
  {
    float x[16];
    const int column = lane % 16;
    solve_column<Tri>(m + Tri::at(warp, warp), column, x);
    __syncthreads();  // all columns are solved before the block is overwritten
    float* to = m + Tri::at(warp, warp) + column;
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) to[i * Tri::kPitch] = x[i];
    }
  }
  __syncthreads();               // the diagonal is there
  if constexpr (Tri::W >= 32) {  // 16 -> 32: X10 = -X11 (L10 X00), two of them, a warp each
    if (warp < 2) {
      const int i = 2 * warp + 1, j = 2 * warp;
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
    __syncthreads();  // both are there
  }
  if constexpr (Tri::W == 64) {  // 32 -> 64: the same with blocks (2, 0) to (3, 1)
    const int i = 2 + warp / 2, j = warp % 2;
    float* corner = m + Tri::at(i, j);
    float c[2][4] = {}, x[2][4] = {};
    for (int k = j; k < 2; ++k) {
      multiply_blocks<Tri::kPitch, Tri::kPitch>(m + Tri::at(i, k), m + Tri::at(k, j), lane, c);
    }
    __syncthreads();  // L has been read
    store_block<Tri>(corner, lane, 1.0f, c);
    __syncthreads();
    for (int k = 2; k <= i; ++k) {
      multiply_blocks<Tri::kPitch, Tri::kPitch>(m + Tri::at(i, k), m + Tri::at(k, j), lane, x);
    }
    __syncthreads();  // L X00 has been read
    store_block<Tri>(corner, lane, -1.0f, x);
    __syncthreads();
  }
}

}  // namespace deltic::gpu
