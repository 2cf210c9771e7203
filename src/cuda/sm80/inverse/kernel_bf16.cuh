// (I + A)^-1 of bf16 matrices of width 32 and 64: a warp has 64 columns, two matrices or one.
#pragma once

#include "cuda/sm80/inverse/params.h"
#include "cuda/sm80/inverse/stage_pairs.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::inverse {

// Rows of 128 bytes: of one head, or of two with neighbouring numbers.
template <int W>
struct RowsOf64 {
  using E = __nv_bfloat16;
  using Tile = PairTile<W>;
  static constexpr int kRows = 4;  // at a time by a warp
  Matrix at;
  int row, vector;  // row of the first round; 16 bytes of a matrix' row
  int place;        // bytes from the tile's start
  bool is_whole;    // all rows of the warp are tokens
  __device__ RowsOf64(const Params& p, unsigned first, int lane)
      : at(find_matrix<W>(p, first + lane % 8 / (W / 8))),
        row(lane / 8),
        vector(lane % 8 % (W / 8)),
        place(row * Tile::kPitch + lane % 8 * 16),
        is_whole(__all_sync(0xFFFFFFFFu, at.left >= W)) {}
  __device__ int64_t place_in(const Rows& x) const {
    return offset(x, at.batch, at.begin + row, at.head) + vector * 8;
  }

  // Blocks of 8 x 8 above the diagonal are not read; rows past the tokens are zero.
  __device__ void load(const Rows& a, Tile& tile) const {
    const MatrixRows<const E> from(a, place_in(a));
    unsigned char* to = tile.x + place;
    if (is_whole) {
#pragma unroll
      for (int r = 0; r < W; r += kRows) {
        if (vector <= r / 8) copy_async(to + r * Tile::kPitch, from[r]);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < W; r += kRows) {
        if (row + r >= at.left) {
          *reinterpret_cast<uint4*>(to + r * Tile::kPitch) = {0, 0, 0, 0};
        } else if (vector <= r / 8) {
          copy_async(to + r * Tile::kPitch, from[r]);
        }
      }
    }
  }
  __device__ void store(const Rows& out, const Tile& tile) const {
    const MatrixRows<E> to(out, place_in(out));
    const unsigned char* from = tile.x + place;
    const auto store_row = [&](int r) {
      uint4 words = {0, 0, 0, 0};
      if (vector <= r / 8) words = *reinterpret_cast<const uint4*>(from + r * Tile::kPitch);
      *reinterpret_cast<uint4*>(to[r]) = words;
    };
    if (is_whole) {
#pragma unroll
      for (int r = 0; r < W; r += kRows) store_row(r);
    } else {
#pragma unroll 1
      for (int r = 0; r < W && row + r < at.left; r += kRows) store_row(r);
    }
  }
};

template <int W, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    inverse_bf16_kernel(const __grid_constant__ Params p) {
  using Tile = PairTile<W>;
  __shared__ Tile tiles[kWarps];
  start(p.tokens);
  if (is_wrong(p.tokens)) return;
  if (blockIdx.x >= p.num_item_ctas) {
    zero_padding(p.tokens, p.out, p.heads, W, blockIdx.x - p.num_item_ctas, kPaddingCtas);
    return;
  }
  const unsigned warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const unsigned first = (blockIdx.x * kWarps + warp) * (64 / W);
  if (first >= p.num_items) return;
  const PairWarp<Tile> view(tiles[warp], lane);
  const RowsOf64<W> rows(p, first, lane);
  grid_wait();
  rows.load(p.a, tiles[warp]);
  copies_commit();
  copies_wait<0>();
  __syncwarp();  // the tile is there, all lanes' vectors
  invert_pairs(view);
  rows.store(p.out, tiles[warp]);
}

}  // namespace deltic::gpu::inverse
