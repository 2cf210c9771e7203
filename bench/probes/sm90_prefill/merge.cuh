// Second preparing stage (warpgroup 1): scores between slabs, operands of the chain, the inverse of the chunk.
//
// Warp p owns slabs p and 7 - p: seven 8 x 8 score blocks together, whatever p. kHigh: the slab in the second half of the
// chunk; i is its place in its half.
#pragma once
#include "slab.cuh"

namespace deltic::gpu {

__device__ inline uint4 mul_bf16x8(uint4 a, uint4 b) {
  return {mul_bf16x2(a.x, b.x), mul_bf16x2(a.y, b.y), mul_bf16x2(a.z, b.z), mul_bf16x2(a.w, b.w)};
}
__device__ inline int l_index(int w, int j) { return w * (w - 1) / 2 + j; }
__device__ inline int t_index(int w, int j) {
  return w < 4 ? w * (w + 1) / 2 + j : w == 4 ? 10 : w == 5 ? 7 + j : 13;
}

// Levels 8, 16, 32 of the rows of slab w: L to fp32 blocks with its row and column scales, Aqk to its tile.
template <bool kHigh>
__device__ inline void merge_scores(Smem& s, int stage, int par, int i, const Lane& ln) {
  constexpr int base = kHigh ? 4 : 0;
  const int w = base + i;
  float acc8[4] = {}, acc16[2][4] = {}, acc32[4][4] = {};
  const Scratch& tab = *reinterpret_cast<const Scratch*>(s.t[par]);
#pragma unroll 1
  for (int it = 0; it < 4; it++) {
    const uint32_t off = ln.row * 128 + step_offset(ln, it);
    const int channel = step_channel(ln, it);
    auto table = [&](const __nv_bfloat16(&row)[kWidth]) {
      return *reinterpret_cast<const uint4*>(row + channel);
    };
    auto column = [&](int j) {
      return *reinterpret_cast<const uint4*>(s.g[stage] + off + 1024 * j);
    };
    auto mma_first = [&](float(&acc)[4], const uint4& k, const uint4& q, const uint4& b) {
      mma_bf16(acc, k.x, q.x, k.y, q.y, b.x, b.y);
    };
    auto mma_second = [&](float(&acc)[4], const uint4& k, const uint4& q, const uint4& b) {
      mma_bf16(acc, k.z, q.z, k.w, q.w, b.z, b.w);
    };
    const uint4 k = *reinterpret_cast<const uint4*>(s.k[stage] + off + 1024 * w),
                q = *reinterpret_cast<const uint4*>(s.q[stage] + off + 1024 * w);
    // The two products into one accumulator are kept apart: they would wait 33 cycles for each other.
    if constexpr (kHigh) {
      uint4 b[4];
#pragma unroll
      for (int j = 0; j < 4; j++) b[j] = column(j);
#pragma unroll
      for (int j = 0; j < 3; j++) b[j] = mul_bf16x8(b[j], table(tab.level32[j]));
      uint4 kl = k, ql = q;
      if (i) {
        uint4 f = table(tab.level32[w - 2]);
        kl = mul_bf16x8(k, f), ql = mul_bf16x8(q, f);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) mma_first(acc32[j], kl, ql, b[j]);
#pragma unroll
      for (int j = 0; j < 4; j++) mma_second(acc32[j], kl, ql, b[j]);
    }
    if (i & 2) {
      uint4 b0 = mul_bf16x8(column(base), table(tab.level16[base >> 1])), b1 = column(base + 1);
      uint4 kl = k, ql = q;
      if (i & 1) {
        uint4 f = table(tab.level16[kHigh ? 3 : 1]);
        kl = mul_bf16x8(k, f), ql = mul_bf16x8(q, f);
      }
      mma_first(acc16[0], kl, ql, b0);
      mma_first(acc16[1], kl, ql, b1);
      mma_second(acc16[0], kl, ql, b0);
      mma_second(acc16[1], kl, ql, b1);
    }
    if (i & 1) {
      uint4 b = column(w - 1);
      mma_first(acc8, k, q, b);
      mma_second(acc8, k, q, b);
    }
  }
  const int row = 8 * w + ln.row;
  const float bk = s.beta_k[par][row];
  auto emit = [&](int j, const float(&acc)[4]) {
    float2 c = *reinterpret_cast<const float2*>(&s.k_scale[par][8 * j + 2 * ln.x]);
    store_block(s.l_block[l_index(w, j)], ln, acc[0] * bk * c.x, acc[1] * bk * c.y);
    *reinterpret_cast<uint32_t*>(s.aqk[par] + swizzled(row, j) + 4 * ln.x) =
        pack_bf16(acc[2], acc[3]);
  };
  if (w & 1) emit(w - 1, acc8);
  if (w & 2) {
    emit(base, acc16[0]);
    emit(base + 1, acc16[1]);
  }
  if constexpr (kHigh) {
#pragma unroll
    for (int j = 0; j < 4; j++) emit(j, acc32[j]);
  }
}

// q exp(G), k exp(G), k exp(G_last - G) of slab w in place, once no warp reads the slab's factors any more.
__device__ inline void finish_operands(Smem& s, int stage, int par, int w, const Lane& ln) {
  const Scratch& tab = *reinterpret_cast<const Scratch*>(s.t[par]);
#pragma unroll 1
  for (int pair = 0; pair < 2; pair++) {  // all reads of 128 channels' half, then all writes
    uint4 k[2], q[2], g[2];
    uint32_t off[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      off[j] = (8 * w + ln.row) * 128 + step_offset(ln, 2 * pair + j);
      k[j] = *reinterpret_cast<const uint4*>(s.k[stage] + off[j]);
      q[j] = *reinterpret_cast<const uint4*>(s.q[stage] + off[j]);
      g[j] = *reinterpret_cast<const uint4*>(s.g[stage] + off[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int channel = step_channel(ln, 2 * pair + j);
      if (w > 0) {
        uint4 f = *reinterpret_cast<const uint4*>(tab.prefix[w - 1] + channel);
        k[j] = mul_bf16x8(k[j], f), q[j] = mul_bf16x8(q[j], f);
      }
      if (w < 7)
        g[j] = mul_bf16x8(g[j], *reinterpret_cast<const uint4*>(tab.suffix[w] + channel));
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      *reinterpret_cast<uint4*>(s.k[stage] + off[j]) = k[j];
      *reinterpret_cast<uint4*>(s.q[stage] + off[j]) = q[j];
      *reinterpret_cast<uint4*>(s.g[stage] + off[j]) = g[j];
    }
  }
}

// Blocks of slab w's rows of the inverse, in its half of the chunk and (slabs 4..7) in the first half.
struct InverseRow {
  float own[4][2];
};

// Level 8: T[w][w-1] = -(T[w][w] L[w][w-1]) T[w-1][w-1]; and the diagonal block where the others look for it.
template <bool kHigh>
__device__ inline void inverse_level8(Smem& s, int par, int i, const Lane& ln, InverseRow& r) {
  const int w = (kHigh ? 4 : 0) + i;
  const Scratch& scratch = *reinterpret_cast<const Scratch*>(s.t[par]);
  const float* block = scratch.inverse[w] + block_index(ln);
  float x[2] = {block[0], block[2]}, z[2] = {};
  if (w != 7) store_block(s.t_block[t_index(w, w)], ln, x[0], x[1]);
  if (w & 1) {
    float y[2] = {};
    mma_tf32_8x8(y, x, load_block(s.l_block[l_index(w, w - 1)], ln));
    mma_tf32_8x8(z, y, load_block(scratch.inverse[w - 1], ln));
    if (w <= 5) store_block(s.t_block[t_index(w, w - 1)], ln, -z[0], -z[1]);
  }
#pragma unroll
  for (int n = 0; n < 4; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) r.own[n][j] = i == n ? x[j] : i == n + 1 ? -z[j] : 0.f;
  }
}
// Level 16: rows of slabs 2, 3 (6, 7) of a half against columns of its slabs 0, 1 (4, 5).
template <bool kHigh>
__device__ inline void inverse_level16(Smem& s, int i, const Lane& ln, InverseRow& r) {
  if (!(i & 2)) return;
  constexpr int base = kHigh ? 4 : 0;
  float y[2][2] = {}, z[2][2] = {};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    mma_tf32_8x8(y[j], r.own[2], load_block(s.l_block[l_index(base + 2, base + j)], ln));
    if (i & 1) mma_tf32_8x8(y[j], r.own[3], load_block(s.l_block[l_index(base + 3, base + j)], ln));
  }
  mma_tf32_8x8(z[1], y[1], load_block(s.t_block[t_index(base + 1, base + 1)], ln));
  mma_tf32_8x8(z[0], y[0], load_block(s.t_block[t_index(base, base)], ln));
  mma_tf32_8x8(z[0], y[1], load_block(s.t_block[t_index(base + 1, base)], ln));
#pragma unroll
  for (int j = 0; j < 2; j++) {
    r.own[j][0] = -z[j][0], r.own[j][1] = -z[j][1];
    if constexpr (!kHigh) store_block(s.t_block[t_index(i, j)], ln, -z[j][0], -z[j][1]);
  }
}
__device__ inline void store_pair(Smem& s, int par, int row, int j, float rk, const float (&t)[2],
                                  const Lane& ln) {
  float2 c = *reinterpret_cast<const float2*>(&s.beta_k[par][8 * j + 2 * ln.x]);
  *reinterpret_cast<uint32_t*>(s.t[par] + swizzled(row, j) + 4 * ln.x) =
      pack_bf16(t[0] * rk * c.x, t[1] * rk * c.y);
}
// Rows of slab w of diag(1/|k|) T diag(beta/|k|); zeros to the right, where scratch was. Slabs 4..7: level 32 first,
// T[w][n] = -sum_j (sum_i T[w][i] L[i][j]) T[j][n] for the columns of the first half.
template <bool kHigh>
__device__ inline void store_inverse(Smem& s, int par, int i, const Lane& ln, const InverseRow& r) {
  const int row = 8 * ((kHigh ? 4 : 0) + i) + ln.row;
  const float rk = s.k_scale[par][row];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    store_pair(s, par, row, (kHigh ? 4 : 0) + j, rk, r.own[j], ln);  // own[j] = 0 for j > i
    if constexpr (!kHigh)
      *reinterpret_cast<uint32_t*>(s.t[par] + swizzled(row, 4 + j) + 4 * ln.x) = 0u;
  }
  if constexpr (kHigh) {
    float y[4][2] = {};
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (n <= i) {
#pragma unroll
        for (int j = 0; j < 4; j++)
          mma_tf32_8x8(y[j], r.own[n], load_block(s.l_block[l_index(4 + n, j)], ln));
      }
    }
    const float minus_rk = -rk;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      float z[2] = {};
#pragma unroll
      for (int j = n; j < 4; j++) mma_tf32_8x8(z, y[j], load_block(s.t_block[t_index(j, n)], ln));
      store_pair(s, par, row, n, minus_rk, z, ln);
    }
  }
}

}  // namespace deltic::gpu
