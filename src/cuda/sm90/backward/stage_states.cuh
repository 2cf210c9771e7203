// What the state before a chunk and the gradient of the one after it give to q, k and G.
//
//     dq = scale exp(G) (do S)     dk = -beta exp(G) (dz S) + beta exp(G_last - G) (e dS)
//     d(exp G_last) = sum_v S dS
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/stage_pairs.cuh"

namespace deltic::gpu::gradient {

// Two channels of a value, of a state of the call; zeros if it is absent.
__device__ inline float2 given_pair(const States& x, int64_t n, int64_t head, int v, int d) {
  if (!x.present) return {0, 0};
  const int64_t at = n * x.s_slot + head * x.s_head + v * x.s_v + d * x.s_k;
  return {load(x.data, x.dtype, at), load(x.data, x.dtype, at + x.s_k)};
}

// Sums over values of S dS, in kParts parts: a thread has two channels of a part. At the ends of a
// sequence one of the two is the call's and not rounded: in short sequences this term is most of
// dg. Operands are visible; a barrier must follow.
template <class Tr>
__device__ void lay_last(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                         int64_t head) {
  using E = typename Tr::E;
  constexpr int kRows = Tr::V / Tr::kParts;
  const int i = thread_index(), part = i / (Tr::K / 2), d = i % (Tr::K / 2) * 2;
  if (part >= Tr::kParts) return;
  float x = 0, y = 0;
  const auto add = [&](int v, bool is_first, bool is_last) {
    const uint32_t at = pair_place<Tr::V>(v, d);
    float2 S = load_pair<E>(s.x.operand.S + at), dS = load_pair<E>(s.x.operand.dS + at);
    if (is_first) S = given_pair(p.initial, tile.sequence, head, v, d);
    if (is_last) dS = given_pair(p.d_final, tile.sequence, head, v, d);
    x += S.x * dS.x, y += S.y * dS.y;
  };
  if (tile.is_first || tile.is_last) {
#pragma unroll 1
    for (int v = 0; v < kRows; ++v) add(part * kRows + v, tile.is_first, tile.is_last);
  } else {
#pragma unroll 4
    for (int v = 0; v < kRows; ++v) add(part * kRows + v, false, false);
  }
  *reinterpret_cast<float2*>(&s.last_parts[part][d]) = {x, y};
}

// A warpgroup's columns of a tile of [kRows][K], as a right operand whose rows are summed over.
template <class Tr, int kRows>
__device__ uint64_t columns_of_tile(const unsigned char* tile) {
  const int first = Part<Tr>().first_column();
  const int byte = first / 64 * kRows * 128 + first % 64 * 2;
  return tile_desc(smem_u32(tile) + static_cast<uint32_t>(byte), kRows * 128, 1024);
}
// The accumulators; dk has the part of exp(G), end that of exp(G_last - G). Products of a
// warpgroup, all tokens and a quarter of the channels: a warp's part has the layout of Fragment.
// Operands are visible to them; under way until end_states.
template <class Tr>
__device__ void begin_states(const GradientShared<Tr>& s, Fragment<Tr>& dq, Fragment<Tr>& dk,
                             Fragment<Tr>& end) {
  using E = typename Tr::E;
  const auto& x = s.x.operand;
  const uint64_t S = columns_of_tile<Tr, Tr::V>(x.S), dS = columns_of_tile<Tr, Tr::V>(x.dS);
  const auto left = [](const unsigned char* tile) { return tile_desc(smem_u32(tile), 16, 1024); };
  const uint64_t d_o = left(x.d_o), dz = left(x.dz), e = left(x.e);
  fence_operands(flat(dk)), fence_operands(flat(end));
  begin_product(dq);
#pragma unroll
  for (int k = 0; k < Tr::V / 16; ++k) {
    const auto at = static_cast<uint32_t>(k / 4 * kChunk * 128 + k % 4 * 32);
    const uint64_t b = desc_at(S, static_cast<uint32_t>(k * 2048));
    wgmma<E, Major::k, Major::mn>(flat(dq), desc_at(d_o, at), b, k > 0);
    wgmma<E, Major::k, Major::mn>(flat(dk), desc_at(dz, at), b, k > 0);
    wgmma<E, Major::k, Major::mn>(flat(end), desc_at(e, at),
                                  desc_at(dS, static_cast<uint32_t>(k * 2048)), k > 0);
  }
  wgmma_commit();
}
template <class Tr>
__device__ void end_states(Fragment<Tr>& dq, Fragment<Tr>& dk, Fragment<Tr>& end) {
  end_product<0>(dq);
  fence_operands(flat(dk)), fence_operands(flat(end));
}

// Without decays per channel: all pairs, onto the accumulators, by products of a warpgroup. dP and
// dM are zero above their diagonals. Operands are visible to products.
template <class Tr>
__device__ void add_pairs(const GradientShared<Tr>& s, Fragment<Tr>& dq, Fragment<Tr>& dk) {
  using E = typename Tr::E;
  const uint64_t keys = columns_of_tile<Tr, kChunk>(s.k),
                 queries = columns_of_tile<Tr, kChunk>(s.q);
  const uint64_t P = tile_desc(smem_u32(s.dP), 16, 1024), M = tile_desc(smem_u32(s.dM), 16, 1024);
  fence_operands(flat(dk));
  begin_product(dq);
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    const auto row = static_cast<uint32_t>(k * 2048), column = static_cast<uint32_t>(k * 32);
    const uint64_t bk = desc_at(keys, row), bq = desc_at(queries, row);
    wgmma<E, Major::k, Major::mn>(flat(dq), desc_at(P, column), bk);
    wgmma<E, Major::k, Major::mn>(flat(dk), desc_at(M, column), bk);
    wgmma<E, Major::mn, Major::mn>(flat(dk), desc_at(P, row), bq);
    wgmma<E, Major::mn, Major::mn>(flat(dk), desc_at(M, row), bk);
  }
  wgmma_commit();
  end_product<0>(dq);
  fence_operands(flat(dk));
}

// Sums over the lanes that have the same columns, an eighth of them: of N numbers a lane ends with
// one in x[0], whose index is returned. Half of the numbers go to another lane at a time: 7
// shuffles of eight numbers instead of 24, added in the same order.
template <int N>
__device__ int sum_columns(float (&x)[N], int lane) {
  int index = 0;
#pragma unroll
  for (int m = 4, left = N / 2; m < 32; m *= 2, left /= 2) {
    const bool is_upper = (lane & m) != 0;
    if (is_upper) index += left;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float gone = is_upper ? x[i] : x[i + left];
      x[i] = is_upper ? x[i + left] : x[i];
      x[i] += __shfl_xor_sync(0xFFFFFFFFu, gone, m);
    }
    if (left == 0) x[0] += __shfl_xor_sync(0xFFFFFFFFu, x[0], m);
  }
  return index;
}

// Factors of the products, and their part of dG: per channel it takes the place of `end`, and sums
// over a block's tokens of what belongs to the tokens after it go to end_parts; else both are
// summed over the warp's channels. A barrier must follow.
template <class Tr>
__device__ void apply_decays(const Params& p, GradientShared<Tr>& s, Fragment<Tr>& dq,
                             Fragment<Tr>& dk, Fragment<Tr>& end) {
  using E = typename Tr::E;
  const Part<Tr> at;
  float starts[2] = {}, ends[2] = {}, column_ends[2 * Tr::kTiles] = {};
  const float* const betas = s.rows_of(kBeta);
#pragma unroll
  for (int n = 0; n < Tr::kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = at.row + 8 * half, c = at.column + 8 * n;
      const float beta = betas[r];
      const float2 k = load_pair<E>(s.k + at.pair(n, half));
      const float2 q = load_pair<E>(s.q + at.pair(n, half));
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int e = 2 * half + x;
        float G, last;
        if constexpr (Tr::kPerChannel) {
          G = s.G[r][c + x], last = s.G[kChunk - 1][c + x];
        } else {
          G = s.rows_of(kSum)[r], last = s.rows_of(kSum)[kChunk - 1];
        }
        const float from_start = decay_between(G), to_end = decay_between(last - G);
        const float key = x == 0 ? k.x : k.y, query = x == 0 ? q.x : q.y;
        dq[n][e] *= p.scale * from_start;
        const float start = -beta * from_start * dk[n][e], tail = beta * to_end * end[n][e];
        dk[n][e] = start + tail;
        const float up_to = query * dq[n][e] + key * start, after = key * tail;
        if constexpr (Tr::kPerChannel) {
          end[n][e] = up_to - after;
          column_ends[2 * n + x] += after;
        } else {
          starts[half] += up_to, ends[half] += after;
        }
      }
    }
  }
  if constexpr (Tr::kPerChannel) {
    const int i = sum_columns(column_ends, at.lane);
    s.end_parts[at.block][at.column + i / 2 * 8 + i % 2] = column_ends[0];
  }
  if constexpr (!Tr::kPerChannel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = starts[half], y = ends[half];
      x += __shfl_xor_sync(0xFFFFFFFFu, x, 1), y += __shfl_xor_sync(0xFFFFFFFFu, y, 1);
      x += __shfl_xor_sync(0xFFFFFFFFu, x, 2), y += __shfl_xor_sync(0xFFFFFFFFu, y, 2);
      if (at.lane % 4 == 0) {
        s.sum_parts[at.quarter][at.row + 8 * half] = x;
        s.end_parts[at.quarter][at.row + 8 * half] = y;
      }
    }
  }
}

}  // namespace deltic::gpu::gradient
