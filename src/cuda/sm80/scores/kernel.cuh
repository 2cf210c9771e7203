// beta k k^T and the scores q k^T of every chunk, with decays between rows; with both asked for,
// the first one inverted. A CTA of four warps has a tile of 64 tokens of one value head.
#pragma once

#include "cuda/sm80/scores/stage_load.cuh"
#include "cuda/sm80/scores/stage_products.cuh"
#include "cuda/sm80/scores/stage_results.cuh"

namespace deltic::gpu::scores {

// The CTA's barrier, from the different places that warps of different roles are at.
__device__ inline void barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Every step of 16 channels: of the first half when it is there, then of the second.
template <class Tr, class F>
__device__ void for_steps(const Params& p, F&& f) {
  const int width = Tr::kWidth > 0 ? Tr::kWidth : p.width, middle = width / 32;
  __pipeline_wait_prior(1);
  barrier();  // the first half of the channels is there
  for (int s = 0; s < middle; ++s) f(s);
  __pipeline_wait_prior(0);
  barrier();  // and the second
  for (int s = middle; s < width / 16; ++s) f(s);
  barrier();  // all have been read: the results may take their place
}

// Four equal parts of the work of a tile, counted in groups whose decays are formed: 12 each.
//   role 0, 1: inside of four groups (levels 4, 2, 1)
//   role 2:    level 32 and half of level 8
//   role 3:    level 16 and the other half of level 8
template <class Tr>
__device__ void inside_role(const Params& p, const Products<Tr>& x, const Results& out, int role,
                            int lane) {
  float c[4][3][4] = {}, diagonal[4] = {};
  for_steps<Tr>(p, [&](int s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) x.inside(4 * role + n, s, c[n], diagonal[n]);
  });
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float block[4], sum = diagonal[n];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    select_levels(c[n], sum, lane, block);
    put_block<Tr>(p, out, 4 * role + n, 4 * role + n, lane, block);
  }
}

template <class Tr>
__device__ void level_32_role(const Params& p, const Products<Tr>& x, const Results& out,
                              int lane) {
  float c[4][4][4] = {}, low[2][1][1][4] = {};
  for_steps<Tr>(p, [&](int s) {
    if (p.W == 64) x.template block<4>(0, s, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) x.template block<1>(2 * n, s, low[n]);
  });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) put_block<Tr>(p, out, 4 + i, j, lane, c[i][j]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) put_block<Tr>(p, out, 2 * n + 1, 2 * n, lane, low[n][0][0]);
}

template <class Tr>
__device__ void level_16_role(const Params& p, const Products<Tr>& x, const Results& out,
                              int lane) {
  float c[2][2][2][4] = {}, low[2][1][1][4] = {};
  for_steps<Tr>(p, [&](int s) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (p.W >= 32) x.template block<2>(4 * n, s, c[n]);
      x.template block<1>(4 + 2 * n, s, low[n]);
    }
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put_block<Tr>(p, out, 4 * n + 2 + i / 2, 4 * n + i % 2, lane, c[n][i / 2][i % 2]);
    }
    put_block<Tr>(p, out, 5 + 2 * n, 4 + 2 * n, lane, low[n][0][0]);
  }
}

// Without decays per channel: warp w has group rows w and 7 - w, nine blocks.
template <class Tr>
__device__ void plain_role(const Params& p, const Products<Tr>& x, const Results& out, int warp,
                           int lane) {
  float c[9][4] = {};
  for_steps<Tr>(p, [&](int s) {
    typename Tr::Fragment low_k = x.raw(x.k, warp, s), high_k = x.raw(x.k, 7 - warp, s);
    typename Tr::Fragment low_q{}, high_q{};
    if constexpr (Tr::kHasQ) low_q = x.raw(x.q, warp, s), high_q = x.raw(x.q, 7 - warp, s);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j > 7 - warp) break;
      const typename Tr::Fragment columns = x.raw(x.k, j, s);
      Products<Tr>::multiply(c[j], high_k, high_q, columns);
      // Rows of the low group: at most four blocks, kept behind the high group's from the end on.
      if (j <= warp) Products<Tr>::multiply(c[8 - j], low_k, low_q, columns);
    }
  });
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j <= 7 - warp) put_block<Tr>(p, out, 7 - warp, j, lane, c[j]);
    if (j <= warp) put_block<Tr>(p, out, warp, j, lane, c[8 - j]);
  }
}

// CTAs are (tile, head), heads fastest. The last kPaddingCtas of a packed call write zeros to the
// rows of no sequence.
template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kCtasPerSm)
    scores_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  const unsigned index = blockIdx.x, heads = static_cast<unsigned>(p.heads);
  if (index >= p.num_items) {
    zero_padding(p.tokens, p.kkt, p.heads, p.W, index - p.num_items, kPaddingCtas);
    zero_padding(p.tokens, p.scores, p.heads, p.W, index - p.num_items, kPaddingCtas);
    return;
  }
  const TokenTile tile = find_tile(p.tokens, index / heads);
  if (tile.length == 0) return;
  const int64_t head = index % heads;
  load_tile<Tr>(p, tile, head, smem);

  const Results out(p, smem, tile.length);
  load_row_values(p, tile, head, out);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Products<Tr> products(p, smem, lane);
  if constexpr (Tr::kPerChannel) {
    // Roles go round the SM's four schedulers from CTA to CTA.
    const int role = (warp + blockIdx.x) % kWarps;
    if (role < 2) {
      inside_role<Tr>(p, products, out, role, lane);
    } else if (role == 2) {
      level_32_role<Tr>(p, products, out, lane);
    } else {
      level_16_role<Tr>(p, products, out, lane);
    }
  } else {
    plain_role<Tr>(p, products, out, warp, lane);
  }
  __syncthreads();  // the results are complete
  finish<Tr>(p, tile, head, out);
}

}  // namespace deltic::gpu::scores
