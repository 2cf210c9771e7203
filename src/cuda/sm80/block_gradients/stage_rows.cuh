// Rows of a tile as registers (a warp has sixteen of them, a lane one channel), as slices of 32
// columns in shared memory, and products of slices with triangles. Called by all threads.
#pragma once

#include "cuda/sm80/block_gradients/params.h"
#include "cuda/tile/invert.cuh"
#include "cuda/tile/lower.cuh"

namespace deltic::gpu::block_gradients {

// A slice in shared memory: 64 rows of 32 columns.
struct Slice {
  static constexpr int kPitch = kColumns + 4;  // see multiply.cuh
  static constexpr int kFloats = kTileTokens * kPitch;
};

__device__ inline int this_warp() { return static_cast<int>(threadIdx.x) / 32; }
__device__ inline int this_lane() { return static_cast<int>(threadIdx.x) % 32; }

// Blocks of 16 rows in the chunk of block w: the first, and the one behind the last.
__device__ inline int first_block(int w, int W) { return w & ~(W / kRows - 1); }
__device__ inline int end_block(int w, int W) { return first_block(w, W) + W / kRows; }

// What stands in rows past the tile's tokens.
enum class Past { zeros, last_row };

// The warp's rows of one channel; zeros past `width`.
template <Past kPast = Past::zeros>
__device__ void load_channel(const Rows& x, const TokenTile& tile, int64_t head, int64_t channel,
                             int64_t width, float (&out)[kRows]) {
  const int first = this_warp() * kRows;
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    // From row to row by a step: sixteen addresses of their own would take 32 registers.
    const int from = kPast == Past::last_row ? min(first, tile.length - 1) : first;
    const E* at =
        static_cast<const E*>(x.data) + offset(x, tile.batch, tile.begin + from, head) + channel;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_there = kPast == Past::last_row || first + i < tile.length;
      out[i] = is_there && channel < width ? to_float(*at) : 0.0f;
      if (kPast == Past::zeros || first + i + 1 < tile.length) at += x.st;
    }
  });
}
__device__ inline void store_channel(const Rows& x, const TokenTile& tile, int64_t head,
                                     int64_t channel, int64_t width, const float (&value)[kRows]) {
  if (!x.present || channel >= width) return;
  const int first = this_warp() * kRows;
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    E* to = static_cast<E*>(x.data) + offset(x, tile.batch, tile.begin + first, head) + channel;
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += x.st) {
      if (first + i < tile.length) *to = from_float<E>(value[i]);
    }
  });
}

// Numbers of the tile's rows, one each: `given` where the tensor is absent, 0 past the tokens (or
// the last token's). Threads 0 to 63.
template <Past kPast = Past::zeros>
__device__ float row_value(const Rows& x, const TokenTile& tile, int64_t head, float given) {
  const int row = static_cast<int>(threadIdx.x);
  const int r = kPast == Past::last_row ? min(row, tile.length - 1) : row;
  if (r >= tile.length) return 0.0f;
  return x.present ? load(x.data, x.dtype, offset(x, tile.batch, tile.begin + r, head)) : given;
}
__device__ inline void store_row_value(const Rows& x, const TokenTile& tile, int64_t head,
                                       float value) {
  const int r = static_cast<int>(threadIdx.x);
  if (!x.present || r >= tile.length) return;
  store(x.data, x.dtype, offset(x, tile.batch, tile.begin + r, head), value);
}

// The warp's rows into a slice, its own rows alone: other warps see them after a barrier.
__device__ inline void lay_rows(const float (&rows)[kRows], float* slice) {
  float* to = slice + this_warp() * kRows * Slice::kPitch + this_lane();
#pragma unroll
  for (int i = 0; i < kRows; ++i) to[i * Slice::kPitch] = rows[i];
}

// Sixteen rows of 32 columns as the matrix instruction leaves them.
using Products = float[2][2][4];

// c += a x with a block of a triangle (kTurn: its transpose) and sixteen rows of a slice.
template <bool kTurn, bool kShortA = false, bool kShortB = false>
__device__ void multiply_rows(const float* block, const float* rows, Products& c) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    multiply_blocks<kLowerPitch, Slice::kPitch, kTurn, false, kShortA, kShortB>(
        block, rows + 16 * n, this_lane(), c[n]);
  }
}

// Products as the warp's rows of a slice, then in registers. The slice has been read by all.
__device__ inline void turn_rows(const Products& c, float* slice, float (&rows)[kRows]) {
  float* own = slice + this_warp() * kRows * Slice::kPitch;
#pragma unroll
  for (int n = 0; n < 2; ++n) store_block<Slice>(own + 16 * n, this_lane(), 1.0f, c[n]);
  __syncwarp();  // the rows are complete
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = own[i * Slice::kPitch + this_lane()];
}

// Blocks of the 64 x 64 products x y^T of two slices: the warp's block row, columns of its chunk up
// to the diagonal.
using Triangle = Triangles<kTileTokens, kLowerPitch>;
template <bool kShortX, bool kShortY>
__device__ void multiply_slices(const float* x, const float* y, int W, float (&c)[kWarps][2][4]) {
  const int w = this_warp(), first = first_block(w, W);
#pragma unroll
  for (int j = 0; j < kWarps; ++j) {
    if (j < first || j > w) continue;
#pragma unroll
    for (int k = 0; k < kColumns; k += 16) {
      multiply_blocks<Slice::kPitch, Slice::kPitch, false, true, kShortX, kShortY>(
          x + w * kRows * Slice::kPitch + k, y + j * kRows * Slice::kPitch + k, this_lane(), c[j]);
    }
  }
}
// The same blocks into a triangle, times a factor.
__device__ inline void put_blocks(const float (&c)[kWarps][2][4], int W, float factor,
                                  float* triangle) {
  const int w = this_warp(), first = first_block(w, W);
#pragma unroll
  for (int j = 0; j < kWarps; ++j) {
    if (j < first || j > w) continue;
    store_block<Triangle>(triangle + Triangle::at(w, j), this_lane(), factor, c[j]);
  }
}

}  // namespace deltic::gpu::block_gradients
