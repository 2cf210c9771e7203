// A tile's q, k and g into shared memory, zeros past the tokens and past K. Called by all threads;
// leaves asynchronous copies under way in two groups, for the two halves of the channels.
#pragma once

#include "cuda/sm80/scores/params.h"
#include "cuda/sm80/scores/traits.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::scores {

// The threads' walk over the elements of kTile rows: f(row, index in the row). Two divisions at the
// start instead of one per element.
template <class F>
__device__ void for_elements(int num_rows, int per_row, F&& f) {
  int r = static_cast<int>(threadIdx.x) / per_row, c = static_cast<int>(threadIdx.x) % per_row;
  const int row_step = kThreads / per_row, step = kThreads % per_row;
  while (r < num_rows) {
    f(r, c);
    r += row_step, c += step;
    if (c >= per_row) c -= per_row, ++r;
  }
}

// Columns [begin, end) of the rows; E: their type in shared memory. With vectors the type in memory
// is the same and all columns are multiples of 16 bytes.
template <class E>
__device__ void load_columns(const Rows& x, bool vectors, const TokenTile& tile, int64_t head,
                             int K, int begin, int end, unsigned char* to, int row_bytes) {
  if (begin == end) return;
  const int64_t base = offset(x, tile.batch, tile.begin, head);
  if (vectors) {
    constexpr int N = Vector<E>::N;
    const E* from = static_cast<const E*>(x.data) + base;
    for_elements(kTile, (end - begin) / N, [&](int r, int i) {
      const int c = begin + i * N;
      unsigned char* at = to + r * row_bytes + c * static_cast<int>(sizeof(E));
      if (r < tile.length && c < K) {
        copy_async(at, from + r * x.st + c);
      } else {
        *reinterpret_cast<float4*>(at) = {0, 0, 0, 0};
      }
    });
    return;
  }
  for_elements(kTile, end - begin, [&](int r, int i) {
    const int c = begin + i;
    const float value =
        r < tile.length && c < K ? load(x.data, x.dtype, base + r * x.st + c) : 0.0f;
    reinterpret_cast<E*>(to + r * row_bytes)[c] = from_float<E>(value);
  });
}

template <class Tr>
__device__ void load_tile(const Params& p, const TokenTile& tile, int64_t head,
                          unsigned char* smem) {
  using E = typename Tr::E;
  const int64_t hk = static_cast<unsigned>(head) / p.group;
  // The first half: what the products begin with while the rest is on its way.
  const int middle = p.width / 32 * 16;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const int begin = part == 0 ? 0 : middle, end = part == 0 ? middle : p.width;
    load_columns<E>(p.k, p.k_vectors, tile, hk, p.K, begin, end, smem, p.row_bytes);
    if constexpr (Tr::kHasQ) {
      load_columns<E>(p.q, p.q_vectors, tile, hk, p.K, begin, end, smem + p.q_at, p.row_bytes);
    }
    if constexpr (Tr::kPerChannel) {
      load_columns<float>(p.g, p.g_vectors, tile, head, p.K, begin, end, smem + p.g_at,
                          p.g_row_bytes);
    }
    __pipeline_commit();
  }
}

}  // namespace deltic::gpu::scores
