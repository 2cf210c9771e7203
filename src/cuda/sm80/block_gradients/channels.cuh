// The gradients of kkt and scores with decays per channel. Channels do not meet (but in dbeta): a
// CTA has a tile, a q/k head and 32 channels, and takes the group's value heads in order.
//
//     y_i = sum_{j<i} D_ij E_ij k_j          z_j = sum_{i>j} D_ij E_ij f_i x_i
//     dx_i = f_i y_i      dk_j = z_j         dbeta_i = x_i . y_i        dG = x dx - k dk
//
// E_ij = exp(G_i - G_j). For pairs of different blocks of 16 tokens the boundary between them at
// the highest level at which they part, 32 or 16, is the reference: row i has exp(G_i - G_ref),
// column j exp(G_ref - G_j), neither above 1 for gates <= 0, and the sums are products of matrices.
// At a level a block has either rows or columns, hence one operand and one result. Inside of a
// block a lane walks over the pairs of its channel.
#pragma once

#include "cuda/ptx/numbers.cuh"
#include "cuda/sm80/block_gradients/stage_rows.cuh"
#include "cuda/tile/bounds.cuh"

namespace deltic::gpu::block_gradients {

inline constexpr float kLog2e = 1.44269504f;

struct ChannelShared {
  alignas(16) float D[kLowerFloats];
  alignas(16) float level[2][Slice::kFloats];  // operands, then results, of levels 32 and 16
  float boundary[kWarps][kColumns];            // G of every block's last row
  float factor[kTileTokens];
};
// Of scores, q too: it is read twice per value head, and registers are short.
struct ScoreShared : ChannelShared {
  alignas(16) float q[Slice::kFloats];
};

// x of the warp's i-th row: q, else k.
struct QueryRows {
  const float* own;
  __device__ explicit QueryRows(const ScoreShared& s)
      : own(s.q + this_warp() * kRows * Slice::kPitch + this_lane()) {}
  __device__ float operator[](int i) const { return own[i * Slice::kPitch]; }
};

// exp(x) of a difference of gates.
__device__ inline float decay_between(float x) { return exp2_approx(x * kLog2e); }

// Level 0 is 32, level 1 is 16. Whether the warp's block has rows of it, else columns; the block
// before the boundary.
__device__ inline bool has_rows(int level) { return (this_warp() & (level == 0 ? 2 : 1)) != 0; }
__device__ inline int boundary_block(int level) { return level == 0 ? 1 : this_warp() & 2; }
__device__ inline int num_levels_before(int W) { return W == 64 ? 0 : W == 32 ? 1 : 2; }

// The factors of the warp's rows at a level.
__device__ inline float level_factor(const ChannelShared& s, int level, float G) {
  const float reference = s.boundary[boundary_block(level)][this_lane()];
  return decay_between(has_rows(level) ? G - reference : reference - G);
}

template <class X>
__device__ void lay_level(const float (&G)[kRows], const float (&k)[kRows], const X& x, int level,
                          ChannelShared& s) {
  float operand[kRows];
  const bool is_row = has_rows(level);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float f = is_row ? s.factor[this_warp() * kRows + i] * x[i] : k[i];
    operand[i] = f * level_factor(s, level, G[i]);
  }
  lay_rows(operand, s.level[level]);
}

// Rows of y take the operands of the columns before the boundary, columns of z those of the rows
// behind it. All operands and D are visible.
__device__ inline void multiply_level(const ChannelShared& s, int level, Products& c) {
  const int w = this_warp(), num = level == 0 ? 2 : 1;
  const int first = level == 0 ? (w < 2 ? 2 : 0) : w ^ 1;  // of the blocks on the other side
  for (int other = first; other < first + num; ++other) {
    const float* rows = s.level[level] + other * kRows * Slice::kPitch;
    has_rows(level) ? multiply_rows<false>(s.D + Triangle::at(w, other), rows, c)
                    : multiply_rows<true>(s.D + Triangle::at(other, w), rows, c);
  }
}

// Pairs of the warp's block, below the diagonal: y and z are added to.
template <class X>
__device__ void add_pairs(const ChannelShared& s, const float (&G)[kRows], const float (&k)[kRows],
                          const X& x, float (&y)[kRows], float (&z)[kRows]) {
  const int first = this_warp() * kRows;
  const float* block = s.D + Triangle::at(this_warp(), this_warp());
#pragma unroll
  for (int i = 1; i < kRows; ++i) {
    const float fx = s.factor[first + i] * x[i];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(block + i * kLowerPitch + j);
      const float D[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (j + n >= i) break;
        const float DE = D[n] * decay_between(G[i] - G[j + n]);
        y[i] += DE * k[j + n];
        z[j + n] += DE * fx;
      }
    }
  }
}

// One value head: y and z of all its pairs. Barriers inside.
template <class X>
__device__ void add_channel_head(const Params& p, const Place& at, int64_t head, bool is_scores,
                                 const float (&k)[kRows], const X& x, ChannelShared& s,
                                 float (&y)[kRows], float (&z)[kRows]) {
  const int64_t channel = int64_t{at.slice} * kColumns + this_lane();
  __syncthreads();  // the head before is done with D and factors
  load_lower<kThreads>(p.d_out, at.tile, head, p.W, is_scores ? 1 : 0, s.D);
  if (threadIdx.x < kTileTokens) {
    s.factor[threadIdx.x] = is_scores ? p.scale : row_value(p.beta, at.tile, head, 1.0f);
  }
  float G[kRows];
  load_channel<Past::last_row>(p.g, at.tile, head, channel, p.K, G);
  s.boundary[this_warp()][this_lane()] = G[kRows - 1];
  __syncthreads();  // D, factors, boundaries
  const int before = num_levels_before(p.W);
#pragma unroll
  for (int level = 0; level < 2; ++level) {
    if (level >= before) lay_level(G, k, x, level, s);
  }
  __syncthreads();  // operands
  Products c[2] = {};
#pragma unroll
  for (int level = 0; level < 2; ++level) {
    if (level >= before) multiply_level(s, level, c[level]);
  }
  __syncthreads();  // they have been read
#pragma unroll
  for (int i = 0; i < kRows; ++i) y[i] = 0, z[i] = 0;
#pragma unroll
  for (int level = 0; level < 2; ++level) {
    if (level < before) continue;
    float rows[kRows];
    turn_rows(c[level], s.level[level], rows);
    const bool is_row = has_rows(level);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float term = rows[i] * level_factor(s, level, G[i]);
      is_row ? y[i] += term : z[i] += term;
    }
  }
  add_pairs(s, G, k, x, y, z);
}

// All value heads of the group; x is k itself, or what has the rows of q.
template <bool kIsScores, class X>
__device__ void run_group(const Params& p, const Place& at, int64_t channel,
                          const float (&k)[kRows], const X& x, ChannelShared& s) {
  const int first = this_warp() * kRows;
  float dk[kRows] = {}, dq[kRows] = {};
  for (unsigned n = 0; n < p.group; ++n) {
    const int64_t head = at.head * p.group + n;
    float y[kRows], z[kRows];
    add_channel_head(p, at, head, kIsScores, k, x, s, y, z);
    if (p.dbeta.present) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float sum = warp_sum(x[i] * y[i]);
        const int64_t row = at.tile.batch * p.tokens.T + at.tile.begin + first + i;
        if (this_lane() == 0 && first + i < at.tile.length) {
          p.parts[(at.slice * p.num_rows + row) * p.HV + head] = sum;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float f = s.factor[first + i], dx = f * y[i];
      y[i] = x[i] * dx - k[i] * z[i];  // dG: a pair of a token with itself is in neither
      dk[i] += z[i];
      if constexpr (kIsScores) {
        const float D = f * s.D[(first + i) * kLowerPitch + first + i];
        dq[i] += dx + D * k[i];
        dk[i] += D * x[i];
      } else {
        dk[i] += dx;
      }
    }
    store_channel(p.dg, at.tile, head, channel, p.K, y);
  }
  if constexpr (kIsScores) store_channel(p.dq, at.tile, at.head, channel, p.K, dq);
  store_channel(p.dk, at.tile, at.head, channel, p.K, dk);
}

template <bool kIsScores>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(3, 2))
    channels_kernel(const __grid_constant__ Params p) {
  __shared__ std::conditional_t<kIsScores, ScoreShared, ChannelShared> s;
  __shared__ Place at;
  if (is_wrong(p.tokens) || !find_place(p, p.H, at)) return;
  const int64_t channel = int64_t{at.slice} * kColumns + this_lane();
  float k[kRows];
  if constexpr (kIsScores) {
    load_channel(p.q, at.tile, at.head, channel, p.K, k);
    lay_rows(k, s.q);  // the lane's own channel: nobody waits for it
  }
  load_channel(p.k, at.tile, at.head, channel, p.K, k);
  if constexpr (kIsScores) {
    run_group<true>(p, at, channel, k, QueryRows(s), s);
  } else {
    run_group<false>(p, at, channel, k, k, s);
  }
}

// dbeta: the slices' parts in order. A thread has a token and value head.
__global__ void __launch_bounds__(kThreads) beta_kernel(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.num_rows * p.HV) return;
  const int64_t row = i / p.HV, head = i - row * p.HV;
  const int64_t batch = row / p.tokens.T, token = row - batch * p.tokens.T;
  if (token >= padding_begin(p.tokens)) return;
  float sum = 0;
  for (unsigned slice = 0; slice < p.key_slices; ++slice) {
    sum += p.parts[(slice * p.num_rows + row) * p.HV + head];
  }
  store(p.dbeta.data, p.dbeta.dtype, offset(p.dbeta, batch, token, head), sum);
}

}  // namespace deltic::gpu::block_gradients
