// (I + A)^-1 in fp32, fp16 and of anything: a warp has a tile of 64 tokens of one head in shared
// memory.
#pragma once

#include <type_traits>

#include "cuda/sm80/inverse/params.h"
#include "cuda/tile/invert_warp.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::inverse {

// Warps share nothing but the CTA. Of two or four, shared memory still holds as many of them (12,
// 22, 36) as of one.
template <int W>
inline constexpr int kWarps = W == 16 ? 4 : 2;

// A row's vectors: N elements of 16 bytes, kRows rows by a warp at a time.
template <int W, class E>
struct Walk {
  static constexpr int N = Vector<E>::N, kPerRow = W / N, kRows = 32 / kPerRow;
  static constexpr int kRounds = kTileTokens / kRows;
  int row, column;
  __device__ explicit Walk(int lane) : row(lane / kPerRow), column(lane % kPerRow * N) {}
};

// Rows of the tile below the diagonal; zeros beyond the tokens, and in vectors that lie above the
// diagonal, which are not read: at W = 64 nearly half of the bytes.
template <int W, class E>
__device__ void load_vectors(const Params& p, const TokenTile& tile, int64_t head, int lane,
                             float* m) {
  using Rounds = Walk<W, E>;
  const Rounds at(lane);
  const int64_t step = Rounds::kRows * p.a.st;
  const E* from = static_cast<const E*>(p.a.data) + offset(p.a, tile.batch, tile.begin, head) +
                  at.row * p.a.st + at.column;
  const int rows_left = tile.length - at.row;
  // A batch of loads is under way before the first is used.
  constexpr int kBatch = Rounds::kRounds < 16 ? Rounds::kRounds : 16;
#pragma unroll
  for (int first = 0; first < Rounds::kRounds; first += kBatch) {
    uint4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i, from += step) {
      const int r = (first + i) * Rounds::kRows;  // row at.row + r; r % W and at.row add up below W
      x[i] = {0, 0, 0, 0};
      if (r < rows_left && at.column < at.row + r % W) {
        x[i] = *reinterpret_cast<const uint4*>(from);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = (first + i) * Rounds::kRows;
      float* to = m + Stack<W>::row(r) + at.row * Stack<W>::kPitch + at.column;
      float y[Rounds::N];
      unpack<E>(x[i], y);
#pragma unroll
      for (int e = 0; e < Rounds::N; e += 4) {
        *reinterpret_cast<float4*>(to + e) = {y[e], y[e + 1], y[e + 2], y[e + 3]};
      }
    }
  }
}

// Everything above the diagonal is zero by now.
template <int W, class E>
__device__ void store_vectors(const Params& p, const TokenTile& tile, int64_t head, int lane,
                              const float* m) {
  using Rounds = Walk<W, E>;
  const Rounds at(lane);
  const int64_t step = Rounds::kRows * p.out.st;
  E* to = static_cast<E*>(p.out.data) + offset(p.out, tile.batch, tile.begin, head) +
          at.row * p.out.st + at.column;
  const int rows_left = tile.length - at.row;
#pragma unroll 8
  for (int i = 0; i < Rounds::kRounds; ++i, to += step) {
    const int r = i * Rounds::kRows;
    if (r >= rows_left) continue;
    const float* from = m + Stack<W>::row(r) + at.row * Stack<W>::kPitch + at.column;
    float x[Rounds::N];
#pragma unroll
    for (int e = 0; e < Rounds::N; e += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + e);
      x[e] = y.x, x[e + 1] = y.y, x[e + 2] = y.z, x[e + 3] = y.w;
    }
    *reinterpret_cast<uint4*>(to) = pack<E>(x);
  }
}

// The same element by element: any dtypes, any strides.
template <int W>
__device__ void load_elements(const Params& p, const TokenTile& tile, int64_t head, int lane,
                              float* m) {
  const int64_t rows = offset(p.a, tile.batch, tile.begin, head);
#pragma unroll 1
  for (int i = lane; i < kTileTokens * W; i += 32) {
    const int r = i / W, c = i % W;
    m[Stack<W>::row(r) + c] =
        r < tile.length && c < r % W ? load(p.a.data, p.a.dtype, rows + r * p.a.st + c) : 0.0f;
  }
}
template <int W>
__device__ void store_elements(const Params& p, const TokenTile& tile, int64_t head, int lane,
                               const float* m) {
  const int64_t rows = offset(p.out, tile.batch, tile.begin, head);
#pragma unroll 1
  for (int i = lane; i < tile.length * W; i += 32) {
    store(p.out.data, p.out.dtype, rows + i / W * p.out.st + i % W,
          m[Stack<W>::row(i / W) + i % W]);
  }
}

// E: the element of both tensors, which are vectors; void: anything.
// Warps are (tile, head), heads fastest: neighbours in memory run together. The last kPaddingCtas
// of a packed call write zeros to the rows of no sequence.
template <int W, class E>
__global__ void __launch_bounds__(32 * kWarps<W>) inverse_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) float tiles[kWarps<W>][Stack<W>::kFloats];
  start(p.tokens);
  if (is_wrong(p.tokens)) return;
  const unsigned warp = threadIdx.x / 32, heads = static_cast<unsigned>(p.heads);
  const unsigned index = blockIdx.x * kWarps<W> + warp;
  if (blockIdx.x >= p.num_item_ctas) {
    zero_padding(p.tokens, p.out, p.heads, W, blockIdx.x - p.num_item_ctas, kPaddingCtas);
    return;
  }
  if (index >= p.num_items) return;
  const TokenTile tile = find_tile(p.tokens, index / heads);
  if (tile.length == 0) return;
  const int64_t head = index % heads;
  const int lane = threadIdx.x % 32;
  float* m = tiles[warp];
  grid_wait();
  if constexpr (std::is_void_v<E>) {
    load_elements<W>(p, tile, head, lane, m);
    __syncwarp();
    invert_by_warp<Stack<W>, false>(m, lane);
    store_elements<W>(p, tile, head, lane, m);
  } else {
    load_vectors<W, E>(p, tile, head, lane, m);
    __syncwarp();
    invert_by_warp<Stack<W>, sizeof(E) == 2>(m, lane);
    store_vectors<W, E>(p, tile, head, lane, m);
  }
}

}  // namespace deltic::gpu::inverse
