// (I + L)^-1 of unit lower triangular matrices in shared memory by one warp, fp32, in place. Blocks
// that only feed the next product stay in registers.
#pragma once

#include "cuda/tile/invert.cuh"

namespace deltic::gpu {

// A tile of 64 rows: 64 / W matrices of width W below each other. The pitch is 4 more than a
// multiple of 16; a matrix begins 8 floats further than the one before would end, so that the four
// blocks on the diagonal, written together, lie in banks of their own (W = 64: in pairs).
template <int W_>
struct Stack {
  static constexpr int W = W_, kPitch = W + 4, kSkew = W < 64 ? 8 : 0;
  static constexpr int kFloats = 64 * kPitch + 64 / W * kSkew;
  static __device__ constexpr int row(int r) { return r * kPitch + r / W * kSkew; }
  // Block row i and block column j, 16 wide, counted in the tile.
  static __device__ constexpr int at(int i, int j) { return row(16 * i) + 16 * j % W; }
};

// The four 16 x 16 blocks on the diagonal, by substitution: a lane has columns c and c + 8 of one
// block. The second one is zero in the first eight rows: 148 multiplications, not 240. Only entries
// below the diagonal are read; what lies above it is written as zeros, but for the upper right
// 8 x 8, which must be zero before.
template <class Tri>
__device__ void solve_diagonal(float* m, int lane) {
  const int c = lane % 8;
  float* block = m + Tri::row(lane / 8 * 16) + lane / 8 * 16 % Tri::W;
  float x[16], y[8];  // y: rows 8 and up
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      *reinterpret_cast<float4*>(&row[j]) =
          *reinterpret_cast<const float4*>(block + i * Tri::kPitch + j);
    }
    x[i] = i == c ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= row[j] * x[j];
    if (i < 8) continue;
    y[i - 8] = i - 8 == c ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 8; j < i; ++j) y[i - 8] -= row[j] * y[j - 8];
  }
  __syncwarp();  // all columns are solved before the block is overwritten
#pragma unroll
  for (int i = 0; i < 16; ++i) block[i * Tri::kPitch + c] = x[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) block[(i + 8) * Tri::kPitch + c + 8] = y[i];
}

// A left operand of 16 x 16: slots t and t + 4 of a product are columns 2 t and 2 t + 1.
using Left = Split[2][4];

template <int kPitch>
__device__ void load_left(const float* a, int lane, Left& f) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 upper = *reinterpret_cast<const float2*>(a + g * kPitch + 8 * k + 2 * t);
    const float2 lower = *reinterpret_cast<const float2*>(a + (g + 8) * kPitch + 8 * k + 2 * t);
    f[k][0] = split(upper.x), f[k][1] = split(lower.x);
    f[k][2] = split(upper.y), f[k][3] = split(lower.y);
  }
}
// Of the block's transpose.
template <int kPitch>
__device__ void load_left_transposed(const float* a, int lane, Left& f) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float* row = a + (8 * k + 2 * t) * kPitch + g;
    f[k][0] = split(row[0]), f[k][1] = split(row[8]);
    f[k][2] = split(row[kPitch]), f[k][3] = split(row[kPitch + 8]);
  }
}

// mt += X^T L^T = (L X)^T, with X^T as loaded. kIsShort: L has no more digits than tf32 (it came as
// bf16 or fp16), so its low part is zero.
template <int kPitch, bool kIsShort>
__device__ void add_transposed(const Left& xt, const float* l, int lane, float (&mt)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 b = *reinterpret_cast<const float2*>(l + (8 * n + g) * kPitch + 8 * k + 2 * t);
      if constexpr (kIsShort) {
        const Split(&a)[4] = xt[k];
        mma_tf32(mt[n], a[0].low, a[1].low, a[2].low, a[3].low, b.x, b.y);
        mma_tf32(mt[n], a[0].high, a[1].high, a[2].high, a[3].high, b.x, b.y);
      } else {
        mma_3xtf32(mt[n], xt[k], {split(b.x), split(b.y)});
      }
    }
  }
}

// The transpose of a product as right operand of the next one: a lane's pairs are where the
// instruction wants them.
struct Right {
  Split x[2][2][2];  // [k][n][slot]
  __device__ explicit Right(const float (&mt)[2][4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e / 4][e / 2 % 2][e % 2] = split(mt[e / 4][e % 4]);
  }
};
__device__ inline void multiply(const Left& a, const Right& b, float (&c)[2][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_3xtf32(c[n], a[k], b.x[k][n]);
  }
}

// X_ij = -X_ii (L_ij X_jj) of two neighbours on the diagonal.
template <class Tri, bool kIsShort>
__device__ void invert_corner(float* m, int i, int j, int lane) {
  Left f;
  float mt[2][4] = {}, x[2][4] = {};
  load_left_transposed<Tri::kPitch>(m + Tri::at(j, j), lane, f);
  add_transposed<Tri::kPitch, kIsShort>(f, m + Tri::at(i, j), lane, mt);
  load_left<Tri::kPitch>(m + Tri::at(i, i), lane, f);
  multiply(f, Right(mt), x);
  __syncwarp();  // L_ij has been read
  store_block<Tri>(m + Tri::at(i, j), lane, -1.0f, x);
}

// Blocks (2, j) and (3, j) of W = 64: the same with two block rows.
template <class Tri, bool kIsShort>
__device__ void invert_corner_column(float* m, int j, int lane) {
  Left f;
  float mt[2][2][4] = {}, x[2][2][4] = {};
#pragma unroll
  for (int k = j; k < 2; ++k) {
    load_left_transposed<Tri::kPitch>(m + Tri::at(k, j), lane, f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      add_transposed<Tri::kPitch, kIsShort>(f, m + Tri::at(2 + i, k), lane, mt[i]);
    }
  }
  const Right upper(mt[0]);
  load_left<Tri::kPitch>(m + Tri::at(2, 2), lane, f);
  multiply(f, upper, x[0]);
  load_left<Tri::kPitch>(m + Tri::at(3, 2), lane, f);
  multiply(f, upper, x[1]);
  load_left<Tri::kPitch>(m + Tri::at(3, 3), lane, f);
  multiply(f, Right(mt[1]), x[1]);
  __syncwarp();  // L of this block column has been read
#pragma unroll
  for (int i = 0; i < 2; ++i) store_block<Tri>(m + Tri::at(2 + i, j), lane, -1.0f, x[i]);
}

// Called by a warp; L is in place and visible, zeros where solve_diagonal wants them, and the
// result is visible at the end. Blocks above the diagonal are not touched.
template <class Tri, bool kIsShort>
__device__ void invert_by_warp(float* m, int lane) {
  solve_diagonal<Tri>(m, lane);
  __syncwarp();  // the diagonal is there
  if constexpr (Tri::W >= 32) {
    invert_corner<Tri, kIsShort>(m, 1, 0, lane);
    invert_corner<Tri, kIsShort>(m, 3, 2, lane);
    __syncwarp();
  }
  if constexpr (Tri::W == 64) {
    invert_corner_column<Tri, kIsShort>(m, 0, lane);
    invert_corner_column<Tri, kIsShort>(m, 1, lane);
    __syncwarp();
  }
}

}  // namespace deltic::gpu
