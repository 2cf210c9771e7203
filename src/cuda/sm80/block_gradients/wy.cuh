// The gradients of the WY pair, w = A K' and u = A V' with K' = beta k exp(G) and V' = beta v, and
// of kg = k exp(G_last - G), qg = q exp(G). Two kernels:
//
//   triangles, a tile of a value head: T = d_w (k exp(G))^T + d_u v^T, lower;
//       dA_ij = beta_j T_ij      dbeta_j = sum_i A_ij T_ij
//       one gate per head: dG_j = beta_j sum_i A_ij T^w_ij + exp(G_j) q_j . d_qg_j - k_j . d_kg_j
//       exp(..)
//   columns, a tile of a q/k head and 32 columns of keys or of values, value head after value head:
//       dK' = A^T d_w      dk += beta exp(G) dK' + exp(G_last - G) d_kg      dq += exp(G) d_qg
//       one gate per channel: dG = K' dK' + qg d_qg - kg d_kg
//       dV' = A^T d_u      dv = beta dV'
//
// The chunk's last row of dG takes the sum of kg d_kg over the other rows.
#pragma once

#include "cuda/sm80/block_gradients/stage_rows.cuh"

namespace deltic::gpu::block_gradients {

// The last token of a row's chunk, as a row of the tile.
__device__ inline int last_row(const TokenTile& tile, int row, int W) {
  return min((row & ~(W - 1)) + W, tile.length) - 1;
}

// ---- Triangles ----

struct TriangleShared {
  alignas(16) float a[kLowerFloats];
  // Two slices, x and y of y x^T; then T.
  alignas(16) float xy[2 * Slice::kFloats];
  float beta[kTileTokens], G[kTileTokens];
  float kg[kTileTokens], qg[kTileTokens];  // k . d_kg and q . d_qg of every row
  float w_sums[kTileTokens];               // sum_i A_ij T^w_ij
};
static_assert(2 * Slice::kFloats >= kLowerFloats, "T takes the slices' place");

// sum_{i>=j} A_ij T_ij of the thread's column j; threads 0 to 63. T is visible.
__device__ inline float column_product(const Params& p, const TokenTile& tile,
                                       const TriangleShared& s) {
  const int j = static_cast<int>(threadIdx.x), end = last_row(tile, j, p.W) + 1;
  float sum = 0;
  for (int i = j; i < end; ++i) sum += s.a[i * kLowerPitch + j] * s.xy[i * kLowerPitch + j];
  return sum;
}

// c += y x^T over all columns of d_w and k exp(G). One gate per head: also k . d_kg and q . d_qg.
// The next slice's rows are on their way while one is multiplied: loads are what the kernel waits
// for. Barriers inside; the slices have been read at the end.
__device__ inline void multiply_key_slices(const Params& p, const Place& at, TriangleShared& s,
                                           float (&c)[kWarps][2][4]) {
  const int64_t key_head = at.head / p.group;
  const int first_row = this_warp() * kRows;
  const bool per_channel = p.gate == Gate::channel;
  float k[kRows], y[kRows], G[kRows];
  const auto load = [&](int64_t channel) {
    load_channel(p.k, at.tile, key_head, channel, p.K, k);
    load_channel(p.d_w, at.tile, at.head, channel, p.K, y);
    if (per_channel) load_channel<Past::last_row>(p.g, at.tile, at.head, channel, p.K, G);
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) G[i] = s.G[first_row + i];
  load(this_lane());
  for (int64_t first = 0; first < p.K; first += kColumns) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) k[i] *= expf(G[i]);
    lay_rows(k, s.xy);
    lay_rows(y, s.xy + Slice::kFloats);
    load(first + kColumns + this_lane());
    __syncthreads();  // the slices are there
    p.short_w ? multiply_slices<true, false>(s.xy + Slice::kFloats, s.xy, p.W, c)
              : multiply_slices<false, false>(s.xy + Slice::kFloats, s.xy, p.W, c);
    __syncthreads();  // they have been read
  }
}

// Sums over channels of x y, rows of a q/k head and of the value head; a barrier must follow.
__device__ inline void multiply_rows_by_rows(const Params& p, const Place& at, const Rows& x,
                                             const Rows& y, float (&to)[kTileTokens]) {
  const int64_t key_head = at.head / p.group;
  float sums[kRows] = {};
  for (int64_t first = 0; y.present && first < p.K; first += kColumns) {
    float a[kRows], b[kRows];
    load_channel(x, at.tile, key_head, first + this_lane(), p.K, a);
    load_channel(y, at.tile, at.head, first + this_lane(), p.K, b);
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] += a[i] * b[i];
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float sum = warp_sum(sums[i]);
    if (this_lane() == 0) to[this_warp() * kRows + i] = sum;
  }
}

// The same over all columns of d_u and v.
__device__ inline void multiply_value_slices(const Params& p, const Place& at, TriangleShared& s,
                                             float (&c)[kWarps][2][4]) {
  float v[kRows], y[kRows];
  const auto load = [&](int64_t column) {
    load_channel(p.v, at.tile, at.head, column, p.V, v);
    load_channel(p.d_u, at.tile, at.head, column, p.V, y);
  };
  load(this_lane());
  for (int64_t first = 0; first < p.V; first += kColumns) {
    lay_rows(v, s.xy);
    lay_rows(y, s.xy + Slice::kFloats);
    load(first + kColumns + this_lane());
    __syncthreads();  // the slices are there
    p.short_u ? multiply_slices<true, true>(s.xy + Slice::kFloats, s.xy, p.W, c)
              : multiply_slices<false, false>(s.xy + Slice::kFloats, s.xy, p.W, c);
    __syncthreads();  // they have been read
  }
}

// dG of a gate per head. A barrier inside.
__device__ inline void store_head_gate(const Params& p, const Place& at, TriangleShared& s) {
  const int r = static_cast<int>(threadIdx.x);
  const bool is_token = r < at.tile.length;
  const int last = is_token ? last_row(at.tile, r, p.W) : 0;
  float dG = 0;
  if (is_token) {
    const float kg = r == last ? 0.0f : s.kg[r] * expf(s.G[last] - s.G[r]);
    dG = s.beta[r] * s.w_sums[r] + s.qg[r] * expf(s.G[r]) - kg;
    s.kg[r] = kg;
  }
  __syncthreads();  // every row's kg d_kg
  if (is_token && r == last) {
    for (int i = r & ~(p.W - 1); i < r; ++i) dG += s.kg[i];
  }
  if (is_token) store_row_value(p.dg, at.tile, at.head, dG);
}

__global__ void __launch_bounds__(kThreads, 3) triangles_kernel(const __grid_constant__ Params p) {
  __shared__ TriangleShared s;
  __shared__ Place at;
  if (is_wrong(p.tokens) || !find_place(p, p.HV, at)) return;
  load_lower<kThreads>(p.a, at.tile, at.head, p.W, 1, s.a);
  if (threadIdx.x < kTileTokens) {
    s.beta[threadIdx.x] = row_value(p.beta, at.tile, at.head, 1.0f);
    s.G[threadIdx.x] =
        p.gate == Gate::head ? row_value<Past::last_row>(p.g, at.tile, at.head, 0.0f) : 0.0f;
    s.w_sums[threadIdx.x] = 0;
  }
  __syncthreads();  // A and the rows' numbers
  const bool has_head_gate = p.gate == Gate::head && p.dg.present;
  float c[kWarps][2][4] = {};
  if (has_head_gate) {
    multiply_rows_by_rows(p, at, p.k, p.d_kg, s.kg);
    multiply_rows_by_rows(p, at, p.q, p.d_qg, s.qg);
  }
  if (p.d_w.present) multiply_key_slices(p, at, s, c);
  if (has_head_gate && p.d_w.present) {
    put_blocks(c, p.W, 1.0f, s.xy);
    __syncthreads();  // T of w alone
    if (threadIdx.x < at.tile.length) s.w_sums[threadIdx.x] = column_product(p, at.tile, s);
  }
  __syncthreads();  // T has been read; sums over channels
  if (p.d_u.present) multiply_value_slices(p, at, s, c);
  put_blocks(c, p.W, 1.0f, s.xy);
  __syncthreads();  // T
  if (p.da.present) {
    store_lower<kThreads>(p.da, at.tile, at.head, p.W, 1, [&](int r, int column) {
      return s.beta[column] * s.xy[r * kLowerPitch + column];
    });
  }
  if (p.dbeta.present && threadIdx.x < at.tile.length) {
    store_row_value(p.dbeta, at.tile, at.head, column_product(p, at.tile, s));
  }
  if (has_head_gate) store_head_gate(p, at, s);
}

// ---- Columns ----

struct ColumnShared {
  alignas(16) float a[kLowerFloats];
  alignas(16) float rows[Slice::kFloats];  // of d_w or d_u, then of the product
  alignas(16) float k[Slice::kFloats];     // a lane reads its own channel: registers are short
  float beta[kTileTokens];
  float last[kWarps][kColumns];  // G of the last token of the warp's block
  float sums[kWarps][kColumns];  // of kg d_kg over the warp's rows
};

template <bool kIsShort>
__device__ void multiply_columns(const Params& p, const ColumnShared& s, Products& c) {
  const int w = this_warp();
  for (int i = w; i < end_block(w, p.W); ++i) {
    multiply_rows<true, kIsShort, kIsShort>(s.a + Triangle::at(i, w),
                                            s.rows + i * kRows * Slice::kPitch, c);
  }
}

// A^T x of the warp's rows, x rows of d_w or d_u. Barriers inside: the first one makes beta and
// what else the caller wrote visible.
__device__ inline void pull_through(const Params& p, const Place& at, int64_t head, const Rows& x,
                                    int64_t column, int64_t width, bool is_short, ColumnShared& s,
                                    float (&out)[kRows]) {
  if (x.present) {
    load_lower<kThreads>(p.a, at.tile, head, p.W, 1, s.a);
    load_channel(x, at.tile, head, column, width, out);
    lay_rows(out, s.rows);
  }
  __syncthreads();  // A, rows
  Products c = {};
  if (x.present) is_short ? multiply_columns<true>(p, s, c) : multiply_columns<false>(p, s, c);
  __syncthreads();  // they have been read
  turn_rows(c, s.rows, out);
}

__device__ inline void load_beta(const Params& p, const Place& at, int64_t head, ColumnShared& s) {
  if (threadIdx.x < kTileTokens) s.beta[threadIdx.x] = row_value(p.beta, at.tile, head, 1.0f);
}

// What one value head adds to a channel's dk and dq, and its dG. Barriers inside.
__device__ inline void add_key_head(const Params& p, const Place& at, int64_t head, int64_t channel,
                                    ColumnShared& s, float (&dk)[kRows], float (&dq)[kRows]) {
  const int w = this_warp(), lane = this_lane(), first = w * kRows;
  const auto k = [&](int i) { return s.k[(first + i) * Slice::kPitch + lane]; };
  load_beta(p, at, head, s);
  float G[kRows] = {}, dG[kRows], x[kRows];
  if (p.gate != Gate::none) {
    const bool per_channel = p.gate == Gate::channel;
    load_channel<Past::last_row>(p.g, at.tile, head, per_channel ? channel : 0,
                                 per_channel ? p.K : 1, G);
  }
  s.last[w][lane] = G[kRows - 1];  // past the tokens it is that of the last one
  pull_through(p, at, head, p.d_w, channel, p.K, p.short_aw, s, x);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float decayed = s.beta[first + i] * expf(G[i]) * x[i];
    dk[i] += decayed;
    dG[i] = k(i) * decayed;
  }
  if (p.d_qg.present) {
    float q[kRows];
    load_channel(p.q, at.tile, at.head, channel, p.K, q);
    load_channel(p.d_qg, at.tile, head, channel, p.K, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float decayed = expf(G[i]) * x[i];
      dq[i] += decayed;
      dG[i] += q[i] * decayed;
    }
  }
  if (p.d_kg.present) {
    load_channel(p.d_kg, at.tile, head, channel, p.K, x);
    const float G_last = s.last[end_block(w, p.W) - 1][lane];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float decayed = expf(G_last - G[i]) * x[i];
      dk[i] += decayed;
      if (first + i == last_row(at.tile, first + i, p.W)) continue;
      const float term = k(i) * decayed;
      dG[i] -= term, sum += term;
    }
    s.sums[w][lane] = sum;
    __syncthreads();  // sums of all warps
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i != last_row(at.tile, first + i, p.W)) continue;
      for (int n = first_block(w, p.W); n <= w; ++n) dG[i] += s.sums[n][lane];
    }
  }
  if (p.gate == Gate::channel) store_channel(p.dg, at.tile, head, channel, p.K, dG);
}

__global__ void __launch_bounds__(kThreads, 3) columns_kernel(const __grid_constant__ Params p) {
  __shared__ ColumnShared s;
  __shared__ Place at;
  if (is_wrong(p.tokens) || !find_place(p, p.H, at)) return;
  if (at.slice >= p.key_slices) {
    const int64_t column = int64_t{at.slice - p.key_slices} * kColumns + this_lane();
    for (unsigned n = 0; n < p.group; ++n) {
      const int64_t head = at.head * p.group + n;
      float dv[kRows];
      __syncthreads();  // the head before is done with beta and its rows
      load_beta(p, at, head, s);
      pull_through(p, at, head, p.d_u, column, p.V, p.short_au, s, dv);
#pragma unroll
      for (int i = 0; i < kRows; ++i) dv[i] *= s.beta[this_warp() * kRows + i];
      store_channel(p.dv, at.tile, head, column, p.V, dv);
    }
    return;
  }
  const int64_t channel = int64_t{at.slice} * kColumns + this_lane();
  float dk[kRows], dq[kRows] = {};
  load_channel(p.k, at.tile, at.head, channel, p.K, dk);
  lay_rows(dk, s.k);
#pragma unroll
  for (int i = 0; i < kRows; ++i) dk[i] = 0;
  for (unsigned n = 0; n < p.group; ++n) {
    __syncthreads();  // the head before is done with its numbers
    add_key_head(p, at, at.head * p.group + n, channel, s, dk, dq);
  }
  store_channel(p.dk, at.tile, at.head, channel, p.K, dk);
  store_channel(p.dq, at.tile, at.head, channel, p.K, dq);
}

}  // namespace deltic::gpu::block_gradients
