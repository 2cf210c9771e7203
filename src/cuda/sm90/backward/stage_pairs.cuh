// Gradients of pairs of tokens: dP and dM from products over values, then what they give to q, k
// and G.
//
//     dP_ij = scale beta_j (do_i e_j)     dM_ij = -beta_i beta_j (dz_i e_j)
//     dq_i += dP_ij w_ij k_j     dk_i += dM_ij w_ij k_j     dk_j += w_ij (dP_ij q_i + dM_ij k_i)
//
// with w_ij = exp(G_i - G_j). Per channel: pairs across blocks of 16 tokens by a boundary between
// them, with factors at most 1 on both sides; inside of a block one by one, fp32, by a running
// product of decays. In dG a pair is added at i and subtracted at j: both are sums over the same
// rounded operands, so that what belongs to neither side of a token cancels to fp32.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/smem.h"
#include "cuda/sm90/backward/stage_rows.cuh"

namespace deltic::gpu::gradient {

inline constexpr float kNats = 1.44269504f;  // log2 e
__device__ inline float decay_between(float x) { return exp2_approx(x * kNats); }

// c += rows x[16 i..] times rows y[16 j..]^T, over `kWidth` columns: 16 x 16.
template <class E, int kWidth>
__device__ void multiply_rows(uint32_t x, int i, uint32_t y, int j, int lane, float (&c)[2][4]) {
#pragma unroll 2
  for (int k = 0; k < kWidth / 16; ++k) {
    uint32_t a[4], b[4];
    load_left<64>(x, 16 * i, 16 * k, lane, a);
    load_right<64>(y, 16 * j, 16 * k, lane, b);
    multiply_pair<E>(c, a, b);
  }
}

// dP and dM. Warp w has block row w % 4 and block column w / 4. Operands are visible; a
// barrier must follow.
template <class Tr>
__device__ void lay_pairs(const Params& p, GradientShared<Tr>& s) {
  using E = typename Tr::E;
  const int thread = thread_index(), lane = thread % 32, bi = thread / 32 % 4, bj = thread / 128;
  if (bj > bi) {
    if constexpr (!Tr::kPerChannel) {
      if (lane < 16) s.pair_rows[bj][16 * bi + lane] = 0, s.pair_columns[bi][16 * bj + lane] = 0;
    }
    return;
  }
  float dP[2][4] = {}, dM[2][4] = {};
  multiply_rows<E, Tr::V>(smem_u32(s.x.operand.d_o), bi, smem_u32(s.x.operand.e), bj, lane, dP);
  multiply_rows<E, Tr::V>(smem_u32(s.x.operand.dz), bi, smem_u32(s.x.operand.e), bj, lane, dM);
  float qk[2][4] = {}, kk[2][4] = {};
  if constexpr (!Tr::kPerChannel) {
    multiply_rows<E, Tr::K>(smem_u32(s.q), bi, smem_u32(s.k), bj, lane, qk);
    multiply_rows<E, Tr::K>(smem_u32(s.k), bi, smem_u32(s.k), bj, lane, kk);
  }
  float row_sums[2] = {}, column_sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * bi + lane / 4 + e / 2 * 8, j = 16 * bj + 8 * n + lane % 4 * 2 + e % 2;
      float w = 1;
      if constexpr (!Tr::kPerChannel) w = i > j ? decay_between(s.G[0][i] - s.G[0][j]) : 1.0f;
      dP[n][e] = i >= j ? p.scale * s.beta[j] * dP[n][e] * w : 0.0f;
      dM[n][e] = i > j ? -s.beta[i] * s.beta[j] * dM[n][e] * w : 0.0f;
      if constexpr (!Tr::kPerChannel) {
        const float pair = i > j ? dP[n][e] * qk[n][e] + dM[n][e] * kk[n][e] : 0.0f;
        row_sums[e / 2] += pair, column_sums[n][e % 2] += pair;
      }
      if constexpr (Tr::kPerChannel) {
        if (bi == bj) s.inside[bi][i % 16][(i - j) & 15] = {dP[n][e], dM[n][e]};
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at =
          pair_place<64>(16 * bi + lane / 4 + 8 * half, 16 * bj + 8 * n + lane % 4 * 2);
      *reinterpret_cast<uint32_t*>(s.dP + at) = pack<E>(dP[n][2 * half], dP[n][2 * half + 1]);
      *reinterpret_cast<uint32_t*>(s.dM + at) = pack<E>(dM[n][2 * half], dM[n][2 * half + 1]);
    }
  }
  if constexpr (!Tr::kPerChannel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = row_sums[half];
      x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
      x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
      if (lane % 4 == 0) s.pair_rows[bj][16 * bi + 8 * half + lane / 4] = x;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float x = column_sums[n / 2][n % 2];
#pragma unroll
      for (int m = 4; m < 32; m *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, m);
      if (lane < 4) s.pair_columns[bi][16 * bj + n / 2 * 8 + lane * 2 + n % 2] = x;
    }
  }
}

// Rows of q and k with decays to or from the boundaries of a level. A thread has eight channels of
// a token. G and rows are visible, the place is free; a barrier must follow.
template <class Tr>
__device__ void lay_level(GradientShared<Tr>& s, int level) {
  using E = typename Tr::E;
  constexpr int kPieces = Tr::K / 8;
  for (int i = thread_index(); i < kChunk * kPieces; i += Tr::kThreads) {
    const int r = i / kPieces, c = i % kPieces * 8;
    const bool is_row = (r & (32 >> level)) != 0;
    const int boundary = level == 0 ? 32 : r / 32 * 32 + 16;
    float x[8], f[8];
    unpack<E>(*reinterpret_cast<const uint4*>(s.k + place<64>(r, c)), x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float between = s.G[r][c + e] - s.G[boundary - 1][c + e];
      f[e] = decay_between(is_row ? between : -between);
      x[e] *= f[e];
    }
    *reinterpret_cast<uint4*>(s.x.level.k + place<64>(r, c)) = pack_operands<E>(x);
    if (!is_row) continue;
    unpack<E>(*reinterpret_cast<const uint4*>(s.q + place<64>(r, c)), x);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= f[e];
    const int to = level == 0 ? r - 32 : r / 32 * 16 + r % 16;
    *reinterpret_cast<uint4*>(s.x.level.q + place<32>(to, c)) = pack_operands<E>(x);
  }
}

// A pair of numbers of type E.
template <class E>
__device__ inline float2 load_pair(const unsigned char* at) {
  return unpack<E>(*reinterpret_cast<const uint32_t*>(at));
}

// Pairs across one level's boundary: adds to the warp's accumulators, and to dq and dG in the
// exchange. Operands are visible. kIsRow: the warp's tokens are after the boundary.
template <class Tr, bool kIsRow>
__device__ void add_level(GradientShared<Tr>& s, int level, Fragment<Tr>& dk) {
  using E = typename Tr::E;
  const int blocks = 2 >> level;  // on each side of a boundary
  const auto& x = s.x.level;
#pragma unroll
  for (int n = 0; n < Tr::kTiles; n += 2) {
    const Part<Tr> at;
    const int boundary = level == 0 ? 2 : at.block / 2 * 2 + 1;  // a block begins there
    const int others = kIsRow ? boundary - blocks : boundary;    // the first on the other side
    const int q_first = level == 0 ? 0 : at.block / 2 * 16;      // row of q that `others` has
    float cq[2][4] = {}, ck[2][4] = {};
    const int column = at.first_column() + 8 * n;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      uint32_t a[4], b[4];
      load_right_turned<64>(smem_u32(x.k), 16 * (others + k), column, at.lane, b);
      if constexpr (kIsRow) {
        load_left<64>(smem_u32(s.dM), 16 * at.block, 16 * (others + k), at.lane, a);
        multiply_pair<E>(ck, a, b);
        load_left<64>(smem_u32(s.dP), 16 * at.block, 16 * (others + k), at.lane, a);
        multiply_pair<E>(cq, a, b);
      } else {
        load_left_turned<64>(smem_u32(s.dM), 16 * (others + k), 16 * at.block, at.lane, a);
        multiply_pair<E>(ck, a, b);
        load_left_turned<64>(smem_u32(s.dP), 16 * (others + k), 16 * at.block, at.lane, a);
        load_right_turned<32>(smem_u32(x.q), q_first + 16 * k, column, at.lane, b);
        multiply_pair<E>(ck, a, b);
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int half = m % 2, tile = m / 2;
      const int r = at.row + 8 * half, c = at.column + 8 * (n + tile);
      const float2 G = *reinterpret_cast<const float2*>(&s.G[r][c]);
      const float2 B = *reinterpret_cast<const float2*>(&s.G[16 * boundary - 1][c]);
      const float2 k = load_pair<E>(x.k + pair_place<64>(r, c));
      auto *to_q = reinterpret_cast<float2*>(&s.x.sum.dq[r][c]),
           *to_G = reinterpret_cast<float2*>(&s.x.sum.dG[r][c]);
      float2 q = {}, sum_q = {}, sum_G = *to_G;
      if constexpr (kIsRow) {
        sum_q = *to_q;
        const int to = level == 0 ? r - 32 : r / 32 * 16 + r % 16;
        q = load_pair<E>(x.q + pair_place<32>(to, c));
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int to = 2 * half + e;
        const float between = e == 0 ? G.x - B.x : G.y - B.y;
        const float f = decay_between(kIsRow ? between : -between);
        const float product = (e == 0 ? k.x : k.y) * ck[tile][to];
        dk[n + tile][to] += f * ck[tile][to];
        if constexpr (kIsRow) {
          (e == 0 ? sum_q.x : sum_q.y) += f * cq[tile][to];
          (e == 0 ? sum_G.x : sum_G.y) += product + (e == 0 ? q.x : q.y) * cq[tile][to];
        } else {
          (e == 0 ? sum_G.x : sum_G.y) -= product;
        }
      }
      if constexpr (kIsRow) *to_q = sum_q;
      *to_G = sum_G;
    }
  }
}

// Without decays per channel: all pairs.
template <class Tr>
__device__ void add_pairs(const GradientShared<Tr>& s, Fragment<Tr>& dq, Fragment<Tr>& dk) {
  using E = typename Tr::E;
  const Part<Tr> at;
  const uint32_t tile_k = smem_u32(s.k), tile_q = smem_u32(s.q);
  for (int j = 0; j < 4; ++j) {
    const bool is_row = j <= at.block, is_column = j >= at.block;
    uint32_t aP[4], aM[4], turned_P[4], turned_M[4];
    if (is_row) {
      load_left<64>(smem_u32(s.dP), 16 * at.block, 16 * j, at.lane, aP);
      load_left<64>(smem_u32(s.dM), 16 * at.block, 16 * j, at.lane, aM);
    }
    if (is_column) {
      load_left_turned<64>(smem_u32(s.dP), 16 * j, 16 * at.block, at.lane, turned_P);
      load_left_turned<64>(smem_u32(s.dM), 16 * j, 16 * at.block, at.lane, turned_M);
    }
#pragma unroll
    for (int n = 0; n < Tr::kTiles; n += 2) {
      uint32_t bk[4], bq[4];
      load_right_turned<64>(tile_k, 16 * j, at.first_column() + 8 * n, at.lane, bk);
      load_right_turned<64>(tile_q, 16 * j, at.first_column() + 8 * n, at.lane, bq);
      if (is_row) {
        multiply_pair<E>(&dq[n], aP, bk);
        multiply_pair<E>(&dk[n], aM, bk);
      }
      if (is_column) {
        multiply_pair<E>(&dk[n], turned_P, bq);
        multiply_pair<E>(&dk[n], turned_M, bk);
      }
    }
  }
}

// The channel of a thread inside of a block, token after token: of the token m before this one the
// decay since then, its key and what it has of dk. Everything moves on by one with a token, so that
// loops over tokens need no index into registers and little of the instruction cache.
struct Behind {
  float w[16] = {1}, k[16] = {}, columns[16] = {};
};

// Token i, of which fewer than kCount are behind: onto the sums in the exchange.
template <class Tr, int kCount>
__device__ void add_token(GradientShared<Tr>& s, Behind& behind, int block, int i, int d) {
  using E = typename Tr::E;
  const int r = 16 * block + i;
  const uint32_t at = place<64>(r, d) + d % 8 * 2;
  const float k = to_float(*reinterpret_cast<const E*>(s.k + at));
  const float q = to_float(*reinterpret_cast<const E*>(s.q + at));
  const float decay = i > 0 ? decay_between(s.G[r][d] - s.G[r - 1][d]) : 1.0f;
  const float4* pairs = reinterpret_cast<const float4*>(s.inside[block][i]);
  float to_q = 0, to_k = 0;
#pragma unroll
  for (int m = kCount - 1; m > 0; --m) {
    const float4 two = pairs[m / 2];
    const float w = behind.w[m - 1] * decay, key = behind.k[m - 1];
    const float P = (m % 2 ? two.z : two.x) * w, M = (m % 2 ? two.w : two.y) * w;
    to_q += P * key;
    to_k += M * key;
    behind.columns[m] = behind.columns[m - 1] + P * q + M * k;
    behind.w[m] = w, behind.k[m] = key;
  }
  behind.k[0] = k;
  const float own = pairs[0].x;
  s.x.sum.dq[r][d] += to_q + own * k;
  s.x.sum.dk[r][d] += to_k + own * q;
  s.x.sum.dG[r][d] += q * to_q + k * to_k;
}

// Pairs inside of a block, onto the sums in the exchange: a thread has a channel d and a block.
template <class Tr>
__device__ void add_inside(GradientShared<Tr>& s, int block, int d) {
  Behind behind;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) add_token<Tr, 8>(s, behind, block, i, d);
#pragma unroll 1
  for (int i = 8; i < 16; ++i) add_token<Tr, 16>(s, behind, block, i, d);
#pragma unroll
  for (int m = 1; m < 16; ++m) {
    const int r = 16 * block + 15 - m;
    s.x.sum.dk[r][d] += behind.columns[m];
    s.x.sum.dG[r][d] -= behind.k[m] * behind.columns[m];
  }
}

}  // namespace deltic::gpu::gradient
