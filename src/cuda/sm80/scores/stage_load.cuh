// A tile's q, k and g into shared memory; past K zeros, past the tokens zeros (g: its last row).
// Called by all threads; leaves asynchronous copies under way in two groups, for the two halves of
// the channels.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/scores/params.h"
#include "cuda/sm80/scores/traits.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::scores {

// The threads' walk over the elements of kTileTokens rows: f(row, index in the row). Two divisions
// at the start instead of one per element.
template <class F>
__device__ void for_elements(int num_rows, int per_row, F&& f) {
  const int thread = thread_index();
  int r = thread / per_row, c = thread % per_row;
  const int row_step = kThreads / per_row, step = kThreads % per_row;
  while (r < num_rows) {
    f(r, c);
    r += row_step, c += step;
    if (c >= per_row) c -= per_row, ++r;
  }
}

// What stands in rows past the tile's tokens.
enum class Past { zeros, last_row };

// Columns [begin, end) of the rows; E: their type in shared memory. With vectors the type in memory
// is the same and all columns are multiples of 16 bytes.
template <class E, Past kPast>
__device__ void load_columns(const Rows& x, bool vectors, const TokenTile& tile, int64_t head,
                             int K, int begin, int end, unsigned char* to, int row_bytes) {
  if (begin == end) return;
  const int64_t base = offset(x, tile.batch, tile.begin, head);
  const auto row_of = [&](int r) { return kPast == Past::last_row ? min(r, tile.length - 1) : r; };
  if (vectors) {
    constexpr int N = Vector<E>::N;
    const E* from = static_cast<const E*>(x.data) + base;
    for_elements(kTileTokens, (end - begin) / N, [&](int r, int i) {
      const int c = begin + i * N, row = row_of(r);
      unsigned char* at = to + r * row_bytes + c * static_cast<int>(sizeof(E));
      if (row < tile.length && c < K) {
        copy_async(at, from + row * x.st + c);
      } else {
        *reinterpret_cast<float4*>(at) = {0, 0, 0, 0};
      }
    });
    return;
  }
  for_elements(kTileTokens, end - begin, [&](int r, int i) {
    const int c = begin + i, row = row_of(r);
    const float value =
        row < tile.length && c < K ? load(x.data, x.dtype, base + row * x.st + c) : 0.0f;
    reinterpret_cast<E*>(to + r * row_bytes)[c] = from_float<E>(value);
  });
}

// The same for one half of a known width, all vectors: a thread has one column of vectors and
// every so many rows.
template <class E, Past kPast, int kWidth>
__device__ void load_half(const Rows& x, const TokenTile& tile, int64_t head, int half,
                          unsigned char* to) {
  constexpr int N = Vector<E>::N, kPerRow = kWidth / 2 / N, kRows = kThreads / kPerRow;
  static_assert(kThreads % kPerRow == 0 && kTileTokens % kRows == 0);
  const unsigned thread = thread_index();
  const int first = thread / kPerRow, c = half * (kWidth / 2) + thread % kPerRow * N;
  const E* from = static_cast<const E*>(x.data) + offset(x, tile.batch, tile.begin, head) + c;
  unsigned char* at = to + first * row_bytes(kWidth, sizeof(E)) + c * static_cast<int>(sizeof(E));
  if (tile.length == kTileTokens) {  // a step from row to row, no comparison
    from += first * x.st;
#pragma unroll
    for (int r = 0; r < kTileTokens; r += kRows, from += kRows * x.st) {
      copy_async(at + r * row_bytes(kWidth, sizeof(E)), from);
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kTileTokens; r += kRows) {
    const int row = kPast == Past::last_row ? min(first + r, tile.length - 1) : first + r;
    unsigned char* place = at + r * row_bytes(kWidth, sizeof(E));
    if (row < tile.length) {
      copy_async(place, from + row * x.st);
    } else {
      *reinterpret_cast<float4*>(place) = {0, 0, 0, 0};
    }
  }
}

template <class Tr>
__device__ void load_tile(const Params& p, const TokenTile& tile, int64_t head,
                          unsigned char* smem) {
  using E = typename Tr::E;
  const int64_t hk = static_cast<unsigned>(head) / p.group;
  // The first half: what the products begin with while the rest is on its way.
  const int middle = p.width / 32 * 16;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if constexpr (Tr::kWidth > 0) {
      load_half<E, Past::zeros, Tr::kWidth>(p.k, tile, hk, half, smem);
      if constexpr (Tr::kHasQ) {
        load_half<E, Past::zeros, Tr::kWidth>(p.q, tile, hk, half, smem + p.q_at);
      }
      if constexpr (Tr::kPerChannel) {
        load_half<float, Past::last_row, Tr::kWidth>(p.g, tile, head, half, smem + p.g_at);
      }
    } else {
      const int begin = half == 0 ? 0 : middle, end = half == 0 ? middle : p.width;
      load_columns<E, Past::zeros>(p.k, p.k_vectors, tile, hk, p.K, begin, end, smem, p.row_bytes);
      if constexpr (Tr::kHasQ) {
        load_columns<E, Past::zeros>(p.q, p.q_vectors, tile, hk, p.K, begin, end, smem + p.q_at,
                                     p.row_bytes);
      }
      if constexpr (Tr::kPerChannel) {
        load_columns<float, Past::last_row>(p.g, p.g_vectors, tile, head, p.K, begin, end,
                                            smem + p.g_at, p.g_row_bytes);
      }
    }
    copies_commit();
  }
}

}  // namespace deltic::gpu::scores
