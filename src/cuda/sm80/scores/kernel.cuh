// beta k k^T and the scores q k^T of every chunk, with decays between rows; with both asked for,
// the first one inverted. A CTA of eight warps has a tile of 64 tokens of one value head.
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

// Eight nearly equal parts of the work of a tile, counted in groups whose decays are formed:
//   role 0 to 3: inside of two groups (levels 4, 2, 1), 6
//   role 4, 5:   two group rows of level 32, 6
//   role 6, 7:   level 16 and level 8 of one half of the tile, 8
template <class Tr>
__device__ void inside_role(const Params& p, const Products<Tr>& x, const Shared& shared,
                            int role) {
  float c[2][3][4] = {}, diagonal[2] = {};
  for_steps<Tr>(p, [&](int s) {
#pragma unroll
    for (int n = 0; n < 2; ++n) x.inside(2 * role + n, s, c[n], diagonal[n]);
  });
  const Results out(p, shared);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float block[4], sum = diagonal[n];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    select_levels(c[n], sum, lane, block);
    put_block<Tr>(p, out, 2 * role + n, 2 * role + n, lane, block);
  }
}

template <class Tr>
__device__ void level_32_role(const Params& p, const Products<Tr>& x, const Shared& shared,
                              int row) {
  float c[2][4][4] = {};
  for_steps<Tr>(p, [&](int s) {
    if (p.W == 64) x.template block<2, 4>(row, 4, 0, s, c);
  });
  const Results out(p, shared);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) put_block<Tr>(p, out, row + n / 4, n % 4, lane, c[n / 4][n % 4]);
}

// first: the half's first group, 0 or 4.
template <class Tr>
__device__ void level_16_role(const Params& p, const Products<Tr>& x, const Shared& shared,
                              int first) {
  float c[2][2][4] = {}, low[2][1][1][4] = {};
  for_steps<Tr>(p, [&](int s) {
    if (p.W >= 32) x.template block<2, 2>(first + 2, first + 2, first, s, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int group = first + 2 * n;
      x.template block<1, 1>(group + 1, group + 1, group, s, low[n]);
    }
  });
  const Results out(p, shared);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    put_block<Tr>(p, out, first + 2 + n / 2, first + n % 2, lane, c[n / 2][n % 2]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    put_block<Tr>(p, out, first + 2 * n + 1, first + 2 * n, lane, low[n][0][0]);
  }
}

// Without decays per channel: a warp has group rows r and 7 - r and half of the columns. Blocks
// above the diagonal are computed too: a branch costs more than they do.
template <class Tr>
__device__ void plain_role(const Params& p, const Products<Tr>& x, const Shared& shared, int warp) {
  constexpr int kHalf = 4;
  const int upper = warp % 4, lower = 7 - upper, first = warp / 4 * kHalf;
  float ck[kHalf][4] = {}, cq[kHalf][4] = {};
  for_steps<Tr>(p, [&](int s) {
    typename Tr::Fragment columns[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) columns[j] = x.raw(x.k, first + j, s);
    if constexpr (Tr::kHasK) {
      const typename Tr::Fragment above = x.raw(x.k, upper, s), below = x.raw(x.k, lower, s);
#pragma unroll
      for (int j = 0; j < kHalf; ++j) Products<Tr>::multiply(ck[j], above, below, columns[j]);
    }
    if constexpr (Tr::kHasQ) {
      const typename Tr::Fragment above = x.raw(x.q, upper, s), below = x.raw(x.q, lower, s);
#pragma unroll
      for (int j = 0; j < kHalf; ++j) Products<Tr>::multiply(cq[j], above, below, columns[j]);
    }
  });
  const Results out(p, shared);
  const int lane = threadIdx.x % 32;
  const int mask = ~(p.W / 8 - 1);  // of a chunk's groups
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const int column = first + j;
    // Rows of one group: blocks of the group's chunk, up to the diagonal.
    const auto put = [&](int row, int at) {
      if (column > row || (column & mask) != (row & mask)) return;
      if constexpr (Tr::kHasK) {
        put_pair<Tr>(p, out, out.kkt, row, column, lane, out.beta[8 * row + lane / 4],
                     at == 0 ? ck[j][0] : ck[j][2], at == 0 ? ck[j][1] : ck[j][3]);
      }
      if constexpr (Tr::kHasQ) {
        put_pair<Tr>(p, out, out.scores, row, column, lane, p.scale, at == 0 ? cq[j][0] : cq[j][2],
                     at == 0 ? cq[j][1] : cq[j][3]);
      }
    };
    put(upper, 0);
    put(lower, 1);
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
  // Where the CTA works is wanted at both ends alone: kept out of the registers in between.
  __shared__ Shared shared;
  {
    const TokenTile tile = find_tile(p.tokens, index / heads);
    if (tile.length == 0) return;
    const int64_t head = index % heads;
    if (thread_index() == 0) shared = {tile, head, smem};
    load_tile<Tr>(p, tile, head, smem);
    load_row_values(p, tile, head, smem);
  }
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const Products<Tr> products(p, smem, lane);
  if constexpr (Tr::kPerChannel) {
    // Roles go round the SM's four schedulers from CTA to CTA.
    const int role = (warp + blockIdx.x) % kWarps;
    if (role < 4) {
      inside_role<Tr>(p, products, shared, role);
    } else if (role < 6) {
      level_32_role<Tr>(p, products, shared, 2 * role - 4);
    } else {
      level_16_role<Tr>(p, products, shared, 4 * (role - 6));
    }
  } else {
    plain_role<Tr>(p, products, shared, warp);
  }
  __syncthreads();  // the results are complete
  finish<Tr>(p, shared);
}

}  // namespace deltic::gpu::scores
