// Tiles in shared memory and in the workspace, and fragments of them for matrix instructions.
//
// A tile of so many rows and W columns of two bytes is W / 64 parts, each all rows of 64 columns;
// a row of a part is 128 bytes, its pieces of 16 bytes exchanged so that eight rows of one column
// of pieces are in different banks. The workspace holds the same bytes: copies need no addresses.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::gradient {

// Byte offset of the 16 bytes that hold (row, column).
template <int kRows>
__device__ inline uint32_t place(int row, int column) {
  return static_cast<uint32_t>(column / 64 * kRows * 128) + swizzled(row, column % 64 / 8);
}
// Of the pair (column, column + 1).
template <int kRows>
__device__ inline uint32_t pair_place(int row, int column) {
  return place<kRows>(row, column) + static_cast<uint32_t>(column % 8 * 2);
}

// Four 8 x 8 blocks of 16 rows and 16 columns. kByRow: the order is (rows, columns) = (low, low),
// (low, high), (high, low), (high, high); else (low, low), (high, low), (low, high), (high, high).
// As a left operand (16 x 16) a tile [m][k] is loaded plain and not by row, a tile [k][m] turned
// and by row. Of a right operand (two times 8 columns) a tile [n][k] plain and by row, a tile
// [k][n] turned and not by row: registers 0, 1 are the first eight columns, 2, 3 the others.
template <int kRows, bool kByRow>
__device__ inline uint32_t block_place(int row, int column, int lane) {
  const int a = lane / 8 % 2 * 8, b = lane / 16 * 8;
  return place<kRows>(row + lane % 8 + (kByRow ? b : a), column + (kByRow ? a : b));
}
template <int kRows>
__device__ inline void load_left(uint32_t tile, int m, int k, int lane, uint32_t (&r)[4]) {
  ldmatrix_x4(r, tile + block_place<kRows, false>(m, k, lane));
}
template <int kRows>
__device__ inline void load_left_turned(uint32_t tile, int k, int m, int lane, uint32_t (&r)[4]) {
  ldmatrix_x4_trans(r, tile + block_place<kRows, true>(k, m, lane));
}
template <int kRows>
__device__ inline void load_right(uint32_t tile, int n, int k, int lane, uint32_t (&r)[4]) {
  ldmatrix_x4(r, tile + block_place<kRows, true>(n, k, lane));
}
template <int kRows>
__device__ inline void load_right_turned(uint32_t tile, int k, int n, int lane, uint32_t (&r)[4]) {
  ldmatrix_x4_trans(r, tile + block_place<kRows, false>(k, n, lane));
}

// The same place 16 k columns further, from one whose column is below 16.
template <int kRows>
__device__ inline uint32_t column_step(uint32_t place, int k) {
  return (place ^ static_cast<uint32_t>(k % 4 << 5)) + static_cast<uint32_t>(k / 4 * kRows * 128);
}

// c[0], c[1]: 16 x 8 each.
template <class E>
__device__ inline void multiply_pair(float (*c)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[4]) {
  mma_pairs<E>(c[0], a[0], a[1], a[2], a[3], b[0], b[1]);
  mma_pairs<E>(c[1], a[0], a[1], a[2], a[3], b[2], b[3]);
}
// Two accumulators as a left operand of 16 x 16.
template <class E>
__device__ inline void to_left(const float (*c)[4], uint32_t (&a)[4]) {
  a[0] = pack<E>(c[0][0], c[0][1]), a[1] = pack<E>(c[0][2], c[0][3]);
  a[2] = pack<E>(c[1][0], c[1][1]), a[3] = pack<E>(c[1][2], c[1][3]);
}

// Products of a warpgroup are under way until wgmma_wait. Their accumulators of 16 x 8 N, as they
// have them:
template <int N>
__device__ inline float (&flat(float (&c)[N][4]))[4 * N] {
  return reinterpret_cast<float(&)[4 * N]>(c);
}
// From here on products may use what shared memory and registers hold.
template <int N>
__device__ inline void begin_product(float (&c)[N][4]) {
  fence_operands(flat(c));
  wgmma_arrive();
}
// All but kPending groups are done, and c is one of theirs.
template <int kPending, int N>
__device__ inline void end_product(float (&c)[N][4]) {
  wgmma_wait<kPending>();
  fence_operands(flat(c));
}

// Rows of a tensor into a tile of 64 rows, from column `column` on; zeros past `count`. A thread's
// copies are a multiple of eight rows apart: one address and one step each in the tile and the
// tensor.
template <class E, int kWidth, int kThreads>
__device__ inline void copy_rows(unsigned char* to, const Rows& x, int64_t batch, int64_t token,
                                 int64_t head, int column, int count, int thread) {
  constexpr int kPieces = kWidth / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kStep % 8 == 0 && 64 % kStep == 0);
  const int row = thread / kPieces, c = thread % kPieces * 8;
  const E* from = static_cast<const E*>(x.data) + offset(x, batch, token + row, head) + column + c;
  const int left = (x.present ? count : 0) - row;
  const int64_t step = x.st * kStep;
  to += place<64>(row, c);
#pragma unroll
  for (int i = 0; i < 64; i += kStep, from += step) {
    copy_async_or_zero(to + i * 128, from, i < left);
  }
}

}  // namespace deltic::gpu::gradient
