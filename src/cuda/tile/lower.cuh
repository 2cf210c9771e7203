// Lower triangles of a tile's chunks in shared memory: 64 x 64, a chunk as a block on the diagonal.
#pragma once

#include "cuda/tile/chunks.cuh"

namespace deltic::gpu {

inline constexpr int kLowerPitch = kTileTokens + 4;  // floats: see multiply.cuh
inline constexpr int kLowerFloats = kTileTokens * kLowerPitch;

// Rows [B,T,HV,W] of the tile. Entry (i, j) of a chunk is read where j < i + limit (0: below the
// diagonal; 1: and on it) and i is a token; the chunk's others are 0, and what lies outside of
// chunks is not touched. Called by all threads; a barrier must follow.
template <int kThreads>
__device__ void load_lower(const Rows& x, const TokenTile& tile, int64_t head, int W, int limit,
                           float* to) {
  const int shift = 31 - __clz(W);
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* from = static_cast<const E*>(x.data) + offset(x, tile.batch, tile.begin, head);
#pragma unroll 8
    for (int i = threadIdx.x; i < kTileTokens << shift; i += kThreads) {
      const int r = i >> shift, c = i & (W - 1), first = r & ~(W - 1);
      const bool is_kept = r < tile.length && first + c < r + limit;
      to[r * kLowerPitch + first + c] = is_kept ? to_float(from[r * x.st + c]) : 0.0f;
    }
  });
}

// value(r, c) of the tile's rows and columns, where load_lower would read; 0 in the chunk's others.
// Called by all threads.
template <int kThreads, class F>
__device__ void store_lower(const Rows& x, const TokenTile& tile, int64_t head, int W, int limit,
                            F&& value) {
  const int shift = 31 - __clz(W);
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    E* to = static_cast<E*>(x.data) + offset(x, tile.batch, tile.begin, head);
    for (int i = threadIdx.x; i < tile.length << shift; i += kThreads) {
      const int r = i >> shift, c = i & (W - 1), first = r & ~(W - 1);
      to[r * x.st + c] = from_float<E>(first + c < r + limit ? value(r, first + c) : 0.0f);
    }
  });
}

}  // namespace deltic::gpu
