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
#pragma unroll 8
    for (int v = 0; v < kRows; ++v) add(part * kRows + v, false, false);
  }
  *reinterpret_cast<float2*>(&s.last_parts[part][d]) = {x, y};
}

// The warp's accumulators; dk has the part of exp(G), end that of exp(G_last - G). Operands are
// visible.
template <class Tr>
__device__ void multiply_states(const GradientShared<Tr>& s, Fragment<Tr>& dq, Fragment<Tr>& dk,
                                Fragment<Tr>& end) {
  using E = typename Tr::E;
  const Part<Tr> at;
  const uint32_t left = block_place<64, false>(16 * at.block, 0, at.lane);
  const uint32_t right = block_place<Tr::V, false>(0, at.first_column(), at.lane);
#pragma unroll
  for (int k = 0; k < Tr::V / 16; ++k) {
    uint32_t o[4], z[4], e[4];
    ldmatrix_x4(o, smem_u32(s.x.operand.d_o) + column_step<64>(left, k));
    ldmatrix_x4(z, smem_u32(s.x.operand.dz) + column_step<64>(left, k));
    ldmatrix_x4(e, smem_u32(s.x.operand.e) + column_step<64>(left, k));
#pragma unroll
    for (int n = 0; n < Tr::kTiles; n += 2) {
      const uint32_t byte = (right ^ n << 4) + static_cast<uint32_t>(k * 2048);
      uint32_t b[4];
      ldmatrix_x4_trans(b, smem_u32(s.x.operand.S) + byte);
      multiply_pair<E>(&dq[n], o, b);
      multiply_pair<E>(&dk[n], z, b);
      ldmatrix_x4_trans(b, smem_u32(s.x.operand.dS) + byte);
      multiply_pair<E>(&end[n], e, b);
    }
  }
}

// Factors of the products, and their part of dG: per channel it takes the place of `end`, and sums
// over a block's tokens of what belongs to the tokens after it go to end_parts; else both are
// summed over the warp's channels. A barrier must follow.
template <class Tr>
__device__ void apply_decays(const Params& p, GradientShared<Tr>& s, Fragment<Tr>& dq,
                             Fragment<Tr>& dk, Fragment<Tr>& end) {
  using E = typename Tr::E;
  const Part<Tr> at;
  float starts[2] = {}, ends[2] = {};
#pragma unroll
  for (int n = 0; n < Tr::kTiles; ++n) {
    float column_ends[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = at.row + 8 * half, c = at.column + 8 * n;
      const float beta = s.rows[s.turn][0][r];
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
          column_ends[x] += after;
        } else {
          starts[half] += up_to, ends[half] += after;
        }
      }
    }
    if constexpr (Tr::kPerChannel) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float y = column_ends[x];
#pragma unroll
        for (int m = 4; m < 32; m *= 2) y += __shfl_xor_sync(0xFFFFFFFFu, y, m);
        if (at.lane < 4) s.end_parts[at.block][at.column + 8 * n + x] = y;
      }
    }
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
