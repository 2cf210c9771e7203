// (I + A)^-1 of every chunk: a warp has a tile of 64 tokens of one head in shared memory.
#pragma once

#include "cuda/sm80/inverse/params.h"
#include "cuda/tile/invert.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::inverse {

// One warp per CTA: 13 of them fill an SM's shared memory at W = 64, and none waits for another.
inline constexpr int kThreads = 32;

template <int W>
using Matrices = Triangles<W, W + 4, false>;

// Rows of the tile, below the diagonal; what lies beyond the tokens is 0. Vectors that lie above
// the diagonal are not read: at W = 64 nearly half of the bytes.
template <int W, class E>
__device__ void load_rows(const Params& p, const TokenTile& tile, int64_t head, int lane,
                          float* m) {
  const E* rows = static_cast<const E*>(p.a.data) + offset(p.a, tile.batch, tile.begin, head);
  if (!p.a_vectors) {
    for (int r = 0; r < kTile; ++r) {
      for (int c = lane; c < W; c += 32) {
        m[r * (W + 4) + c] = r < tile.length && c < r % W ? to_float(rows[r * p.a.st + c]) : 0.0f;
      }
    }
    return;
  }
  constexpr int N = Vector<E>::N, kPerRow = W / N, kRows = 32 / kPerRow;
  const int row = lane / kPerRow, column = lane % kPerRow * N;
  // A batch of loads is under way before the first is used.
  constexpr int kRounds = kTile / kRows, kBatch = kRounds < 16 ? kRounds : 16;
#pragma unroll 1
  for (int first = row; first < kTile; first += kBatch * kRows) {
    Vector<E> x[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = first + i * kRows;
      if (r < tile.length && column < r % W) {
        x[i] = *reinterpret_cast<const Vector<E>*>(rows + r * p.a.st + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float* to = &m[(first + i * kRows) * (W + 4) + column];
#pragma unroll
      for (int e = 0; e < N; e += 4) {
        *reinterpret_cast<float4*>(to + e) = {to_float(x[i].x[e]), to_float(x[i].x[e + 1]),
                                              to_float(x[i].x[e + 2]), to_float(x[i].x[e + 3])};
      }
    }
  }
}

template <int W, class E>
__device__ void store_rows(const Params& p, const TokenTile& tile, int64_t head, int lane,
                           const float* m) {
  E* rows = static_cast<E*>(p.out.data) + offset(p.out, tile.batch, tile.begin, head);
  if (!p.out_vectors) {
    for (int r = 0; r < tile.length; ++r) {
      for (int c = lane; c < W; c += 32) {
        rows[r * p.out.st + c] = from_float<E>(c <= r % W ? m[r * (W + 4) + c] : 0.0f);
      }
    }
    return;
  }
  constexpr int N = Vector<E>::N, kPerRow = W / N, kRows = 32 / kPerRow;
  const int row = lane / kPerRow, column = lane % kPerRow * N;
#pragma unroll 4
  for (int first = 0; first < kTile; first += kRows) {
    const int r = first + row;
    if (r >= tile.length) continue;
    Vector<E> x;
#pragma unroll
    for (int e = 0; e < N; e += 4) {
      const float4 y = *reinterpret_cast<const float4*>(&m[r * (W + 4) + column + e]);
      const float z[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.x[e + i] = from_float<E>(column + e + i <= r % W ? z[i] : 0.0f);
      }
    }
    *reinterpret_cast<Vector<E>*>(rows + r * p.out.st + column) = x;
  }
}

// CTAs are (tile, head), heads fastest: neighbours in memory run together. The last kPaddingCtas of
// a packed call write zeros to the rows of no sequence.
template <int W>
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Params p) {
  __shared__ alignas(16) float m[kTile * (W + 4)];
  if (is_wrong(p.tokens)) return;
  const unsigned index = blockIdx.x, heads = static_cast<unsigned>(p.heads);
  if (index >= p.num_items) {
    zero_padding(p.tokens, p.out, p.heads, W, index - p.num_items, kPaddingCtas);
    return;
  }
  const TokenTile tile = find_tile(p.tokens, index / heads);
  if (tile.length == 0) return;
  const int64_t head = index % heads;
  const int lane = threadIdx.x;
  with_dtype(p.a.dtype, [&](auto* tag) {
    load_rows<W, std::remove_pointer_t<decltype(tag)>>(p, tile, head, lane, m);
  });
  __syncwarp();
  invert<Matrices<W>, 1>(m, 0, lane);
  with_dtype(p.out.dtype, [&](auto* tag) {
    store_rows<W, std::remove_pointer_t<decltype(tag)>>(p, tile, head, lane, m);
  });
}

}  // namespace deltic::gpu::inverse
