// beta k k^T and the scores q k^T of every chunk, with decays between rows; with both asked for,
// the first one inverted. A CTA of four warps has a tile of 64 tokens of one value head.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/scores/stage_load.cuh"
#include "cuda/sm80/scores/stage_products.cuh"
#include "cuda/sm80/scores/stage_results.cuh"
#include "cuda/tile/bounds.cuh"

namespace deltic::gpu::scores {

// The CTA's barrier, from the different places that warps of different roles are at.
__device__ inline void barrier() { named_sync_1_converged<kThreads>(); }

// Every step of 16 channels: of the first half when it is there, then of the second.
template <class Tr, class F>
__device__ void for_steps(const Params& p, F&& f) {
  const int width = Tr::kWidth > 0 ? Tr::kWidth : p.width, middle = width / 32;
  copies_wait<1>();
  barrier();  // the first half of the channels is there
  for (int s = 0; s < middle; ++s) f(s);
  copies_wait<0>();
  barrier();  // and the second
  for (int s = middle; s < width / 16; ++s) f(s);
  barrier();  // all have been read: the results may take their place
}

// Four equal parts of the work of a tile, counted in groups whose decays are formed: 12 each.
//   role 0, 1: inside of four groups (levels 4, 2, 1)
//   role 2:    level 32 and level 8 of the tile's first half
//   role 3:    level 16 and level 8 of its second half
template <class Tr>
__device__ void inside_role(const Params& p, const Products<Tr>& x, unsigned char* smem,
                            const Shared& shared, int role) {
  float c[4][3][4] = {}, diagonal[4] = {};
  for_steps<Tr>(p, [&](int s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) x.inside(4 * role + n, s, c[n], diagonal[n]);
  });
  const Results out(p, smem, shared);
  const int lane = thread_index() % 32;
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
__device__ void level_32_role(const Params& p, const Products<Tr>& x, unsigned char* smem,
                              const Shared& shared) {
  float c[4][4][4] = {}, low[2][1][1][4] = {};
  for_steps<Tr>(p, [&](int s) {
    if (p.W == 64) x.template block<4, 4>(4, 4, 0, s, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) x.template block<1, 1>(2 * n + 1, 2 * n + 1, 2 * n, s, low[n]);
  });
  const Results out(p, smem, shared);
  const int lane = thread_index() % 32;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    if (p.W == 64) put_block<Tr>(p, out, 4 + n / 4, n % 4, lane, c[n / 4][n % 4]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) put_block<Tr>(p, out, 2 * n + 1, 2 * n, lane, low[n][0][0]);
}

template <class Tr>
__device__ void level_16_role(const Params& p, const Products<Tr>& x, unsigned char* smem,
                              const Shared& shared) {
  float c[2][2][2][4] = {}, low[2][1][1][4] = {};
  for_steps<Tr>(p, [&](int s) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (p.W >= 32) x.template block<2, 2>(4 * n + 2, 4 * n + 2, 4 * n, s, c[n]);
      const int group = 4 + 2 * n;
      x.template block<1, 1>(group + 1, group + 1, group, s, low[n]);
    }
  });
  const Results out(p, smem, shared);
  const int lane = thread_index() % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put_block<Tr>(p, out, 4 * n + 2 + i / 2, 4 * n + i % 2, lane, c[n][i / 2][i % 2]);
    }
    put_block<Tr>(p, out, 5 + 2 * n, 4 + 2 * n, lane, low[n][0][0]);
  }
}

// Without decays per channel: warp w has group rows w and 7 - w. Blocks above the diagonal are
// computed too: a branch costs more than they do.
inline constexpr int kPlainColumns = 8;
template <class Tr>
__device__ void plain_products(const Params& p, const Products<Tr>& x, int warp,
                               float (&ck)[kPlainColumns][4], float (&cq)[kPlainColumns][4]) {
  const int upper = warp, lower = 7 - warp;
  for_steps<Tr>(p, [&](int s) {
    typename Tr::Fragment k_above, k_below, q_above, q_below;
    if constexpr (Tr::kHasK) k_above = x.raw(x.k, upper, s), k_below = x.raw(x.k, lower, s);
    if constexpr (Tr::kHasQ) q_above = x.raw(x.q, upper, s), q_below = x.raw(x.q, lower, s);
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
      const typename Tr::Fragment columns = x.raw(x.k, j, s);
      if constexpr (Tr::kHasK) Products<Tr>::multiply(ck[j], k_above, k_below, columns);
      if constexpr (Tr::kHasQ) Products<Tr>::multiply(cq[j], q_above, q_below, columns);
    }
  });
}

template <class Tr>
__device__ void plain_role(const Params& p, const Products<Tr>& x, unsigned char* smem,
                           const Shared& shared, int warp) {
  float ck[kPlainColumns][4] = {}, cq[kPlainColumns][4] = {};
  plain_products<Tr>(p, x, warp, ck, cq);
  const Results out(p, smem, shared);
  const int lane = thread_index() % 32, mask = ~(p.W / 8 - 1);  // of a chunk's groups
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half == 0 ? warp : 7 - warp;
    const float beta = out.beta[8 * row + lane / 4];
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
      // Blocks of the row's chunk, up to the diagonal.
      if (j > row || (j & mask) != (row & mask)) continue;
      if constexpr (Tr::kHasK) {
        put_pair<Tr>(p, out, out.kkt, row, j, lane, beta, ck[j][2 * half], ck[j][2 * half + 1]);
      }
      if constexpr (Tr::kHasQ) {
        put_pair<Tr>(p, out, out.scores, row, j, lane, p.scale, cq[j][2 * half],
                     cq[j][2 * half + 1]);
      }
    }
  }
}

// CTAs are (tile, head), heads fastest. The last kPaddingCtas of a packed call write zeros to the
// rows of no sequence.
template <class Tr>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    scores_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  if (is_wrong(p.tokens)) return;
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
    if (thread_index() == 0) shared = {tile, head};
    load_tile<Tr>(p, tile, head, smem);
    load_row_values(p, tile, head, smem);
  }
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const Products<Tr> products(p, smem, lane);
  if constexpr (Tr::kPerChannel) {
    // Roles go round the SM's four schedulers from CTA to CTA.
    const int role = (warp + blockIdx.x) % kWarps;
    if (role < 2) {
      inside_role<Tr>(p, products, smem, shared, role);
    } else if (role == 2) {
      level_32_role<Tr>(p, products, smem, shared);
    } else {
      level_16_role<Tr>(p, products, smem, shared);
    }
  } else {
    plain_role<Tr>(p, products, smem, shared, warp);
  }
  __syncthreads();  // the results are complete
  finish<Tr>(p, smem, shared);
}

}  // namespace deltic::gpu::scores
