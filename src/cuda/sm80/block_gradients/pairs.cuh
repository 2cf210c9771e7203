// The gradients of kkt and scores without decays per channel. The decay of a pair of tokens is one
// number, so with N_ij = D_ij E_ij of a value head, x = k or q, f = beta or scale:
//
//     M = sum over the group of f_i N_ij             dx = M k        dk = M^T x
//     S = x k^T                                      dbeta_i = sum_j N_ij S_ij
//     dG_i = sum_{j<i} f_i N_ij S_ij - sum_{l>i} f_l N_li S_li
//
// The group is summed before the products: one pair of them for all its value heads. A CTA has a
// tile and a q/k head.
#pragma once

#include "cuda/sm80/block_gradients/stage_rows.cuh"

namespace deltic::gpu::block_gradients {

struct PairShared {
  alignas(16) float m[kLowerFloats];  // S, then M
  alignas(16) float k[Slice::kFloats], q[Slice::kFloats];
  float factor[kTileTokens], G[kTileTokens];
  float row_sums[kTileTokens], column_sums[kWarps][kTileTokens];
};

// What a lane has of the warp's rows of a 64 x 64 matrix: columns lane and lane + 32.
using Entries = float[kRows][2];

// f(i, n, row, column) for the lane's entries of the tile's chunks, up to the diagonal or below it;
// next(i) behind every row.
template <bool kIsScores, class F, class Next>
__device__ void for_entries(const TokenTile& tile, int W, F&& f, Next&& next) {
  const int first = this_warp() * kRows;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int r = first + i, c = this_lane() + 32 * n;
      if (r < tile.length && c < r + (kIsScores ? 1 : 0) && c >= (r & ~(W - 1))) f(i, n, r, c);
    }
    next(i);
  }
}
template <bool kIsScores, class F>
__device__ void for_entries(const TokenTile& tile, int W, F&& f) {
  for_entries<kIsScores>(tile, W, f, [](int) {});
}

// The warp's rows of a slice of k and q, on their way while the slice before is multiplied: loads
// are what the kernel waits for.
template <bool kIsScores>
struct KeyRows {
  float k[kRows], q[kIsScores ? kRows : 1];

  __device__ void load(const Params& p, const Place& at, int64_t first) {
    load_channel(p.k, at.tile, at.head, first + this_lane(), p.K, k);
    if constexpr (kIsScores) load_channel(p.q, at.tile, at.head, first + this_lane(), p.K, q);
  }
  // Into the warp's own rows; a barrier must follow.
  __device__ void lay(PairShared& s) const {
    lay_rows(k, s.k);
    if constexpr (kIsScores) lay_rows(q, s.q);
  }
};

// S, the lane's entries. Barriers inside; all slices have been read at the end.
template <bool kIsScores>
__device__ void multiply_keys(const Params& p, const Place& at, PairShared& s, Entries& S) {
  float c[kWarps][2][4] = {};
  KeyRows<kIsScores> rows;
  rows.load(p, at, 0);
  for (int64_t first = 0; first < p.K; first += kColumns) {
    rows.lay(s);
    rows.load(p, at, first + kColumns);
    __syncthreads();  // the slice is there
    const float* x = kIsScores ? s.q : s.k;
    p.short_keys ? multiply_slices<true, true>(x, s.k, p.W, c)
                 : multiply_slices<false, false>(x, s.k, p.W, c);
    __syncthreads();  // it has been read
  }
  put_blocks(c, p.W, 1.0f, s.m);
  __syncwarp();  // the warp's rows of S
  for_entries<kIsScores>(at.tile, p.W, [&](int i, int n, int row, int column) {
    S[i][n] = s.m[row * kLowerPitch + column];
  });
}

// One value head: its part of M; with S its dbeta and dG. Barriers inside.
template <bool kIsScores>
__device__ void add_head(const Params& p, const Place& at, int64_t head, bool has_sums,
                         PairShared& s, const Entries& S, Entries& M) {
  __syncthreads();  // the head before is done with the rows' numbers
  if (threadIdx.x < kTileTokens) {
    s.factor[threadIdx.x] = kIsScores ? p.scale : row_value(p.beta, at.tile, head, 1.0f);
    s.G[threadIdx.x] = row_value<Past::last_row>(p.g, at.tile, head, 0.0f);
  }
  Entries D;
  with_dtype(p.d_out.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* row = static_cast<const E*>(p.d_out.data) +
                   offset(p.d_out, at.tile.batch, at.tile.begin + this_warp() * kRows, head);
    const int columns[2] = {this_lane() & (p.W - 1), (this_lane() + 32) & (p.W - 1)};
    for_entries<kIsScores>(
        at.tile, p.W, [&](int i, int n, int, int) { D[i][n] = to_float(row[columns[n]]); },
        [&](int) { row += p.d_out.st; });
  });
  __syncthreads();  // the rows' numbers
  float sum = 0, columns[2] = {};
  for_entries<kIsScores>(
      at.tile, p.W,
      [&](int i, int n, int row, int column) {
        const float N = D[i][n] * expf(s.G[row] - s.G[column]), f = s.factor[row];
        M[i][n] += f * N;
        if (row == column) return;  // both of dG's terms: they cancel
        const float term = N * S[i][n];
        sum += term, columns[n] += f * term;
      },
      [&](int i) {
        if (!has_sums) return;
        sum = warp_sum(sum);
        if (this_lane() == 0) s.row_sums[this_warp() * kRows + i] = sum;
        sum = 0;
      });
  if (!has_sums) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) s.column_sums[this_warp()][this_lane() + 32 * n] = columns[n];
  __syncthreads();  // sums of rows and columns
  if (threadIdx.x >= kTileTokens) return;
  const float row = s.row_sums[threadIdx.x];
  float column = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) column += s.column_sums[w][threadIdx.x];
  store_row_value(p.dbeta, at.tile, head, row);
  store_row_value(p.dg, at.tile, head, s.factor[threadIdx.x] * row - column);
}

// What M adds up of a slice: rows of M k, columns of M^T x. M and the slice are visible.
template <bool kIsShort>
__device__ void multiply_slice(const Params& p, const float* m, const float* k, const float* x,
                               Products& of_rows, Products& of_columns) {
  const int w = this_warp();
  for (int j = first_block(w, p.W); j <= w; ++j) {
    multiply_rows<false, false, kIsShort>(m + Triangle::at(w, j), k + j * kRows * Slice::kPitch,
                                          of_rows);
  }
  for (int i = w; i < end_block(w, p.W); ++i) {
    multiply_rows<true, false, kIsShort>(m + Triangle::at(i, w), x + i * kRows * Slice::kPitch,
                                         of_columns);
  }
}

// dq and dk of a slice; k alone has both kinds of terms. Rows are those of the slice, then of the
// next one. Barriers inside; the first one makes M visible.
template <bool kIsScores>
__device__ void store_slice(const Params& p, const Place& at, int64_t first,
                            KeyRows<kIsScores>& next, PairShared& s) {
  next.lay(s);
  next.load(p, at, first + kColumns);
  __syncthreads();  // the slice is there
  Products row_terms = {}, column_terms = {};
  Products& of_rows = kIsScores ? row_terms : column_terms;
  const float* x = kIsScores ? s.q : s.k;
  p.short_keys ? multiply_slice<true>(p, s.m, s.k, x, of_rows, column_terms)
               : multiply_slice<false>(p, s.m, s.k, x, of_rows, column_terms);
  __syncthreads();  // it has been read
  float rows[kRows];
  if constexpr (kIsScores) {
    turn_rows(row_terms, s.q, rows);
    store_channel(p.dq, at.tile, at.head, first + this_lane(), p.K, rows);
  }
  turn_rows(column_terms, s.k, rows);
  store_channel(p.dk, at.tile, at.head, first + this_lane(), p.K, rows);
}

template <bool kIsScores>
__global__ void __launch_bounds__(kThreads, 3) pairs_kernel(const __grid_constant__ Params p) {
  __shared__ PairShared s;
  __shared__ Place at;
  if (is_wrong(p.tokens) || !find_place(p, p.H, at)) return;
  const bool has_sums = p.dbeta.present || p.dg.present;
  Entries S = {}, M = {};
  if (has_sums) multiply_keys<kIsScores>(p, at, s, S);
  for (unsigned n = 0; n < p.group; ++n) {
    add_head<kIsScores>(p, at, at.head * p.group + n, has_sums, s, S, M);
  }
  if (!p.dq.present && !p.dk.present) return;
  __syncwarp();  // S has been read: M takes its place, each warp its own rows
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      s.m[(this_warp() * kRows + i) * kLowerPitch + this_lane() + 32 * n] = M[i][n];
    }
  }
  KeyRows<kIsScores> rows;
  rows.load(p, at, 0);
  for (int64_t first = 0; first < p.K; first += kColumns) {
    store_slice<kIsScores>(p, at, first, rows, s);
  }
}

}  // namespace deltic::gpu::block_gradients
