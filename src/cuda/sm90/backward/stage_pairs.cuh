// Gradients of pairs of tokens: dP and dM from products over values, then what they give to q, k
// and G.
//
//     dP_ij = scale beta_j (do_i e_j)     dM_ij = -beta_i beta_j (dz_i e_j)
//     dq_i += dP_ij w_ij k_j     dk_i += dM_ij w_ij k_j     dk_j += w_ij (dP_ij q_i + dM_ij k_i)
//
// with w_ij = exp(G_i - G_j). Per channel: pairs across blocks of 8 tokens by a boundary between
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

// c0 += x0 y^T, c1 += x1 y^T: rows [16 i, 16 i + 16) of tiles x, rows [16 j, 16 j + 16) of y, over
// `kWidth` columns.
template <class E, int kWidth>
__device__ void multiply_rows(uint32_t x0, uint32_t x1, int i, uint32_t y, int j, int lane,
                              float (&c0)[2][4], float (&c1)[2][4]) {
  const uint32_t left = block_place<64, false>(16 * i, 0, lane);
  const uint32_t right = block_place<64, true>(16 * j, 0, lane);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    uint32_t a0[4], a1[4], b[4];
    ldmatrix_x4(a0, x0 + column_step<64>(left, k));
    ldmatrix_x4(a1, x1 + column_step<64>(left, k));
    ldmatrix_x4(b, y + column_step<64>(right, k));
    multiply_pair<E>(c0, a0, b);
    multiply_pair<E>(c1, a1, b);
  }
}

// Sixteen bytes of a tile of what rounding left.
template <class Tr>
__device__ uint4 rest_of(const void* from, int64_t i, int byte) {
  return *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + i * Tr::kValueBytes +
                                         byte);
}
// A thread's pieces of it, in the order of the tiles. They are wanted long before they are used:
// else all warps would wait for memory.
template <class Tr>
using Rest = uint4[Tr::kValuePieces];
template <class Tr>
__device__ void load_rest(const Params& p, const GradientShared<Tr>& s, Rest<Tr>& rest) {
  if (!p.dbeta.present) return;
#pragma unroll
  for (int i = 0; i < Tr::kValuePieces; ++i) {
    rest[i] = rest_of<Tr>(p.work.dz_rest, s.item, (i * Tr::kThreads + thread_index()) * 16);
  }
}
// dbeta = dz e, summed over 64 value columns at a time, by all warps. dz with what rounding left of
// it: rounded like e it would double the error. In a sequence's first chunk e is as well: short
// sequences have no other tokens among which rounding would even out. dz and e are visible.
template <class Tr>
__device__ void lay_dbeta(const Params& p, GradientShared<Tr>& s, const Rest<Tr>& rest) {
  using E = typename Tr::E;
  if (!p.dbeta.present) return;
  const int64_t first = s.tile.sequence * p.HV + s.head;
  const bool is_first = s.tile.is_first;
#pragma unroll 1
  for (int i = 0; i < Tr::kValuePieces; ++i) {
    const int byte = (i * Tr::kThreads + thread_index()) * 16;
    uint4 words = rest[0];
#pragma unroll
    for (int n = 1; n < Tr::kValuePieces; ++n) {
      if (i == n) words = rest[n];
    }
    float z[8], e[8], x[8], sum = 0;
    unpack<E>(words, x);
    unpack<E>(*reinterpret_cast<const uint4*>(s.x.operand.dz + byte), z);
    unpack<E>(*reinterpret_cast<const uint4*>(s.x.operand.e + byte), e);
#pragma unroll
    for (int n = 0; n < 8; ++n) z[n] += x[n];
    if (is_first) {
      unpack<E>(rest_of<Tr>(p.work.e_rest, first, byte), x);
#pragma unroll
      for (int n = 0; n < 8; ++n) e[n] += x[n];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += z[n] * e[n];
#pragma unroll
    for (int m = 1; m < 8; m *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, m);
    const int row = byte / 128;
    if (byte % 128 == 0) s.dbeta_parts[row / kChunk][row % kChunk] = sum;
  }
}
// dP and dM. Warps 0 to 9 have the blocks on and below the diagonal, row after row, so that every
// scheduler has two or three; the others have none. Operands are visible; a barrier must follow.
template <class Tr>
__device__ void lay_pairs(const Params& p, GradientShared<Tr>& s) {
  using E = typename Tr::E;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (warp >= 10) {  // of a block above the diagonal
    const int bj = 1 + (warp >= 11) + (warp >= 13), bi = warp - 10 - bj * (bj - 1) / 2;
    if constexpr (!Tr::kPerChannel) {
      if (lane < 16) s.pair_rows[bj][16 * bi + lane] = 0, s.pair_columns[bi][16 * bj + lane] = 0;
    }
    return;
  }
  const int bi = (warp >= 1) + (warp >= 3) + (warp >= 6), bj = warp - bi * (bi + 1) / 2;
  const float* const beta = s.rows_of(kBeta);
  float dP[2][4] = {}, dM[2][4] = {};
  multiply_rows<E, Tr::V>(smem_u32(s.x.operand.d_o), smem_u32(s.x.operand.dz), bi,
                          smem_u32(s.x.operand.e), bj, lane, dP, dM);
  float qk[2][4] = {}, kk[2][4] = {};
  if constexpr (!Tr::kPerChannel) {
    multiply_rows<E, Tr::K>(smem_u32(s.q), smem_u32(s.k), bi, smem_u32(s.k), bj, lane, qk, kk);
  }
  float row_sums[2] = {}, column_sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * bi + lane / 4 + e / 2 * 8, j = 16 * bj + 8 * n + lane % 4 * 2 + e % 2;
      float w = 1;
      if constexpr (!Tr::kPerChannel) {
        const float* const G = s.rows_of(kSum);
        w = i > j ? decay_between(G[i] - G[j]) : 1.0f;
      }
      dP[n][e] = i >= j ? p.scale * beta[j] * dP[n][e] * w : 0.0f;
      dM[n][e] = i > j ? -beta[i] * beta[j] * dM[n][e] * w : 0.0f;
      if constexpr (!Tr::kPerChannel) {
        const float pair = i > j ? dP[n][e] * qk[n][e] + dM[n][e] * kk[n][e] : 0.0f;
        row_sums[e / 2] += pair, column_sums[n][e % 2] += pair;
      }
      if constexpr (Tr::kPerChannel) {
        if (bi == bj && n == e / 2) s.inside[i][(i - j) & 7] = {dP[n][e], dM[n][e]};
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

// A pair of numbers of type E.
template <class E>
__device__ inline float2 load_pair(const unsigned char* at) {
  return unpack<E>(*reinterpret_cast<const uint32_t*>(at));
}

// The block that begins at the boundary between the warp's tokens and those it meets.
__device__ inline int level_boundary(int level, int block) {
  return level == 0 ? 2 : block / 2 * 2 + 1;
}
// The row of the warp's first token among those of q in the exchange.
__device__ inline int level_row(int level, int block) {
  return level == 0 ? 16 * block - 32 : block / 2 * 16;
}
// What a lane made for a level, for its own tokens: decays, and k with them, in pairs. For q as
// well there are no registers.
template <class Tr>
struct LevelOperands {
  float w[Tr::kTiles][4];
  uint32_t k[Tr::kTiles][2];
};
// The warp's operands of a level, to the exchange: k times decays between its tokens and the
// boundary, and if is_row, which is that they are after it, q. The exchange is free, G and rows are
// visible; a barrier must follow.
template <class Tr>
__device__ void lay_level(GradientShared<Tr>& s, int level, bool is_row, LevelOperands<Tr>& own) {
  using E = typename Tr::E;
  const float sign = is_row ? kNats : -kNats;
  const Part<Tr> at;
  const float* last = &s.G[16 * level_boundary(level, at.block) - 1][at.column];
  const float* here = &s.G[at.row][at.column];
  const uint32_t to_k = block_place<64, false>(16 * at.block, at.first_column(), at.lane);
  const uint32_t to_q =
      block_place<32, false>(level_row(level, at.block), at.first_column(), at.lane);
  const uint32_t pair = at.pair(0, 0);
#pragma unroll
  for (int n = 0; n < Tr::kTiles; n += 2) {
    uint32_t xk[4], xq[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int half = m % 2, tile = n + m / 2;
      const uint32_t byte = (pair ^ static_cast<uint32_t>(tile << 4)) + half * 1024;
      const float2 B = *reinterpret_cast<const float2*>(last + 8 * tile);
      const float2 G = *reinterpret_cast<const float2*>(here + 8 * half * Tr::kPitch + 8 * tile);
      const float2 k = load_pair<E>(s.k + byte);
      float* w = own.w[tile] + 2 * half;
      w[0] = exp2_approx((G.x - B.x) * sign), w[1] = exp2_approx((G.y - B.y) * sign);
      xk[m] = own.k[tile][half] = pack<E>(k.x * w[0], k.y * w[1]);
      if (is_row) {
        const float2 q = load_pair<E>(s.q + byte);
        xq[m] = pack<E>(q.x * w[0], q.y * w[1]);
      }
    }
    stmatrix_x4(smem_u32(s.x.level.k) + (to_k ^ n << 4), xk);
    if (is_row) stmatrix_x4(smem_u32(s.x.level.q) + (to_q ^ n << 4), xq);
  }
}

// Pairs across one level's boundary, onto the warp's accumulators and dq in the exchange. Operands
// are visible. kIsRow: the warp's tokens are after the boundary.
template <class Tr, bool kIsRow>
__device__ void add_level(GradientShared<Tr>& s, int level, const LevelOperands<Tr>& own,
                          Fragment<Tr>& dk, Fragment<Tr>& dG) {
  using E = typename Tr::E;
  const auto& x = s.x.level;
  const int blocks = 2 >> level;  // on each side of a boundary
  const Part<Tr> at;
  const int boundary = level_boundary(level, at.block);
  const int others = kIsRow ? boundary - blocks : boundary;  // the first on the other side
  // Of the first of the others: dP and dM, and k and q from the warp's first channel on. The next
  // one is 16 columns or rows of dP and dM further; only those of level 0 have one, from 0 or 32
  // on.
  const uint32_t left = kIsRow ? block_place<64, false>(16 * at.block, 16 * others, at.lane)
                               : block_place<64, true>(16 * others, 16 * at.block, at.lane);
  const uint32_t keys = block_place<64, false>(16 * others, at.first_column(), at.lane);
  // q: rows that the others have, or the lane's own.
  const int q_row = level == 0 ? 0 : at.block / 2 * 16;
  const uint32_t queries = block_place<32, false>(q_row, at.first_column(), at.lane);
  const uint32_t own_q = pair_place<32>(level_row(level, at.block) + at.lane / 4, at.column);
#pragma unroll
  for (int n = 0; n < Tr::kTiles; n += 2) {
    float cq[2][4] = {}, ck[2][4] = {};
    const uint32_t column = static_cast<uint32_t>(n << 4);
#pragma unroll 1
    for (uint32_t k = 0; k < static_cast<uint32_t>(blocks); ++k) {
      uint32_t a[4], b[4];
      ldmatrix_x4_trans(b, smem_u32(x.k) + (keys ^ column) + 2048 * k);
      if constexpr (kIsRow) {
        ldmatrix_x4(a, smem_u32(s.dM) + (left ^ k << 5));
        multiply_pair<E>(ck, a, b);
        ldmatrix_x4(a, smem_u32(s.dP) + (left ^ k << 5));
        multiply_pair<E>(cq, a, b);
      } else {
        ldmatrix_x4_trans(a, smem_u32(s.dM) + left + 2048 * k);
        multiply_pair<E>(ck, a, b);
        ldmatrix_x4_trans(a, smem_u32(s.dP) + left + 2048 * k);
        ldmatrix_x4_trans(b, smem_u32(x.q) + (queries ^ column) + 2048 * k);
        multiply_pair<E>(ck, a, b);
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int half = m % 2, tile = m / 2;
      const float2 k = unpack<E>(own.k[n + tile][half]);
      auto* to_q =
          reinterpret_cast<float2*>(&s.x.sum.dq[at.row + 8 * half][at.column + 8 * (n + tile)]);
      float2 q = {}, sum_q = {};
      if constexpr (kIsRow) {
        q = load_pair<E>(x.q + (own_q ^ static_cast<uint32_t>(n + tile << 4)) + half * 1024);
        sum_q = *to_q;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 2 * half + e;
        const float w = own.w[n + tile][i];
        const float product = (e == 0 ? k.x : k.y) * ck[tile][i];
        dk[n + tile][i] += w * ck[tile][i];
        if constexpr (kIsRow) {
          (e == 0 ? sum_q.x : sum_q.y) += w * cq[tile][i];
          dG[n + tile][i] += product + (e == 0 ? q.x : q.y) * cq[tile][i];
        } else {
          dG[n + tile][i] -= product;
        }
      }
      if constexpr (kIsRow) *to_q = sum_q;
    }
  }
}

// Pairs across the middle of the warp's sixteen tokens, of which a lane has one on each side: no
// operand leaves the warp. G, rows, dP and dM are visible.
template <class Tr>
__device__ void add_middle(GradientShared<Tr>& s, Fragment<Tr>& dk, Fragment<Tr>& dG) {
  using E = typename Tr::E;
  const auto square = [&](const unsigned char* tile) {
    const Part<Tr> at;
    const uint32_t place = pair_place<64>(at.row + 8, 16 * at.block + at.lane % 4 * 2);
    return *reinterpret_cast<const uint32_t*>(tile + place);
  };
  const uint32_t P = square(s.dP), M = square(s.dM);
  const uint32_t turned_P = transpose_pairs(P), turned_M = transpose_pairs(M);
  const Part<Tr> at;
#pragma unroll
  for (int n = 0; n < Tr::kTiles; ++n) {
    const int c = at.column + 8 * n;
    const float2 B = *reinterpret_cast<const float2*>(&s.G[16 * at.block + 7][c]);
    const float2 G0 = *reinterpret_cast<const float2*>(&s.G[at.row][c]);
    const float2 G1 = *reinterpret_cast<const float2*>(&s.G[at.row + 8][c]);
    const float2 k0 = load_pair<E>(s.k + at.pair(n, 0));
    const float2 k1 = load_pair<E>(s.k + at.pair(n, 1));
    const float2 q1 = load_pair<E>(s.q + at.pair(n, 1));
    const float before[2] = {decay_between(B.x - G0.x), decay_between(B.y - G0.y)};
    const float after[2] = {decay_between(G1.x - B.x), decay_between(G1.y - B.y)};
    const uint32_t xk0 = pack<E>(k0.x * before[0], k0.y * before[1]);
    const uint32_t xk1 = pack<E>(k1.x * after[0], k1.y * after[1]);
    const uint32_t xq1 = pack<E>(q1.x * after[0], q1.y * after[1]);
    float rows[4] = {}, columns[4] = {};  // rows: to dq, to dk; columns: two numbers alone
    mma_half<E>(rows, P, M, transpose_pairs(xk0));
    mma_pairs<E>(columns, turned_P, 0, turned_M, 0, transpose_pairs(xq1), transpose_pairs(xk1));
    auto* to_q = reinterpret_cast<float2*>(&s.x.sum.dq[at.row + 8][c]);
    const float2 sum_q = *to_q;
    *to_q = {sum_q.x + after[0] * rows[0], sum_q.y + after[1] * rows[1]};
    const float2 y0 = unpack<E>(xk0), y1 = unpack<E>(xk1), z1 = unpack<E>(xq1);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      dk[n][e] += before[e] * columns[e];
      dG[n][e] -= (e == 0 ? y0.x : y0.y) * columns[e];
      dk[n][2 + e] += after[e] * rows[2 + e];
      dG[n][2 + e] += (e == 0 ? z1.x : z1.y) * rows[e] + (e == 0 ? y1.x : y1.y) * rows[2 + e];
    }
  }
}

// Pairs inside of eight tokens, one by one, onto the sums in the exchange: a thread has channels d
// and d + 1 of tokens [first, first + 8).
template <class Tr>
__device__ void add_inside(GradientShared<Tr>& s, int first, int d) {
  using E = typename Tr::E;
  using Pair = float[2];
  Pair k[8], q[8], decay[8], columns[8], w[8];
  const uint32_t at = pair_place<64>(first, d);
  const auto pair_of = [&](int i, int m) { return s.inside[first + i][m]; };  // of i and i - m
  Pair G = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t byte = (at ^ static_cast<uint32_t>(i << 4)) + static_cast<uint32_t>(i * 128);
    const float2 own_k = load_pair<E>(s.k + byte), own_q = load_pair<E>(s.q + byte);
    const float2 here = *reinterpret_cast<const float2*>(&s.G[first + i][d]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      k[i][e] = e == 0 ? own_k.x : own_k.y, q[i][e] = e == 0 ? own_q.x : own_q.y;
      const float x = e == 0 ? here.x : here.y;
      decay[i][e] = i > 0 ? decay_between(x - G[e]) : 1.0f;
      G[e] = x, columns[i][e] = 0;
    }
  }
  // A token with those after it: from the last one on, by one more decay at a time.
#pragma unroll
  for (int i = 7; i > 0; --i) {
#pragma unroll
    for (int m = 1; m <= i; ++m) {  // tokens back
      const float2 pair = pair_of(i, m);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = columns[i - m][e];
        x = decay[i][e] * (x + pair.x * q[i][e] + pair.y * k[i][e]);
      }
    }
  }
  // And with those before it, whose k gets one more decay at a time.
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float own = pair_of(i, 0).x;
    Pair to_q = {}, to_k = {};
#pragma unroll
    for (int m = 1; m <= i; ++m) {
      const float2 pair = pair_of(i, m);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = w[i - m][e];
        x *= decay[i][e];
        to_q[e] += pair.x * x, to_k[e] += pair.y * x;
      }
    }
    const auto sum_at = [&](auto& sums) { return reinterpret_cast<float2*>(&sums[first + i][d]); };
    float2 sum_q = *sum_at(s.x.sum.dq), sum_k = *sum_at(s.x.sum.dk), sum_G = *sum_at(s.x.sum.dG);
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // dG is without the token's own pair
      const float x = k[i][e], y = q[i][e], column = columns[i][e];
      (e == 0 ? sum_q.x : sum_q.y) += to_q[e] + own * x;
      (e == 0 ? sum_k.x : sum_k.y) += to_k[e] + own * y + column;
      (e == 0 ? sum_G.x : sum_G.y) += y * to_q[e] + x * (to_k[e] - column);
      w[i][e] = x;
    }
    *sum_at(s.x.sum.dq) = sum_q, *sum_at(s.x.sum.dk) = sum_k, *sum_at(s.x.sum.dG) = sum_G;
  }
}

}  // namespace deltic::gpu::gradient
