// Second preparing stage (the eight carrying warps, before they carry): scores between slabs,
// operands of the chain, the inverse of the chunk. kHigh: a slab in the second half of the chunk; i
// is its place in its half.
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

struct ScoreRow {  // reads of one slab's rows and of other slabs' columns, eight channels per lane
  const Smem& s;
  const Scratch& tab;
  int stage, w, channel;
  uint32_t off;
  __device__ ScoreRow(const Smem& s, int stage, int par, int w, int it, const Lane& ln)
      : s(s),
        tab(*reinterpret_cast<const Scratch*>(s.t[par])),
        stage(stage),
        w(w),
        channel(step_channel(ln, it)),
        off(ln.row * 128 + step_offset(ln, it)) {}
  __device__ uint4 k() const {
    return *reinterpret_cast<const uint4*>(s.k[stage] + off + 1024 * w);
  }
  __device__ uint4 q() const {
    return *reinterpret_cast<const uint4*>(s.q[stage] + off + 1024 * w);
  }
  __device__ uint4 column(int j) const {
    return *reinterpret_cast<const uint4*>(s.g[stage] + off + 1024 * j);
  }
  __device__ uint4 factor(const __nv_bfloat16 (&row)[kWidth]) const {
    return *reinterpret_cast<const uint4*>(row + channel);
  }
};
// Both products of N columns; the two into one accumulator are kept apart, they would wait 33
// cycles for each other.
template <int N>
__device__ inline void mma_columns(float (*acc)[4], const uint4& k, const uint4& q,
                                   const uint4 (&b)[N]) {
#pragma unroll
  for (int j = 0; j < N; j++) mma_bf16(acc[j], k.x, q.x, k.y, q.y, b[j].x, b[j].y);
#pragma unroll
  for (int j = 0; j < N; j++) mma_bf16(acc[j], k.z, q.z, k.w, q.w, b[j].z, b[j].w);
}
// L[w][j] to its fp32 block with row and column scales, Aqk[w][j] to its tile.
__device__ inline void emit_scores(Smem& s, int par, int w, int j, const float (&acc)[4],
                                   const Lane& ln) {
  const int row = 8 * w + ln.row;
  const float bk = s.beta_k[par][row];
  float2 c = *reinterpret_cast<const float2*>(&s.k_scale[par][8 * j + 2 * ln.x]);
  store_block(s.l_block[l_index(w, j)], ln, acc[0] * bk * c.x, acc[1] * bk * c.y);
  *reinterpret_cast<uint32_t*>(s.aqk[par] + swizzled(row, j) + 4 * ln.x) =
      pack_bf16(acc[2], acc[3]);
}

// Level 32: rows of slab 4 + i, columns of slabs 0..3. kScaleRows: i > 0, the first slab after the
// boundary needs no factor. Shared memory is the fullest pipe: no factor of one is loaded, no row
// of operands twice.
template <bool kScaleRows>
__device__ inline void scores_level32(Smem& s, int stage, int par, int i, const Lane& ln) {
  float acc[4][4] = {};
#pragma unroll 1
  for (int it = 0; it < 4; it++) {
    const ScoreRow r(s, stage, par, 4 + i, it, ln);
    uint4 k = r.k(), q = r.q(), b[4];
#pragma unroll
    for (int j = 0; j < 4; j++) b[j] = r.column(j);
#pragma unroll
    for (int j = 0; j < 3; j++) b[j] = mul_bf16x8(b[j], r.factor(r.tab.level32[j]));
    if constexpr (kScaleRows) {
      const uint4 f = r.factor(r.tab.level32[i + 2]);
      k = mul_bf16x8(k, f), q = mul_bf16x8(q, f);
    }
    mma_columns(acc, k, q, b);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) emit_scores(s, par, 4 + i, j, acc[j], ln);
}
// Level 16: rows of slab base + 2 or (kOdd) base + 3, columns of slabs base, base + 1.
template <bool kOdd>
__device__ inline void scores_level16(Smem& s, int stage, int par, int base, const Lane& ln) {
  float acc[2][4] = {};
  const int w = base + (kOdd ? 3 : 2);
#pragma unroll 2
  for (int it = 0; it < 4; it++) {
    const ScoreRow r(s, stage, par, w, it, ln);
    uint4 k = r.k(), q = r.q(), b[2] = {r.column(base), r.column(base + 1)};
    b[0] = mul_bf16x8(b[0], r.factor(r.tab.level16[base / 2]));
    if constexpr (kOdd) {
      const uint4 f = r.factor(r.tab.level16[base / 2 + 1]);
      k = mul_bf16x8(k, f), q = mul_bf16x8(q, f);
    }
    mma_columns(acc, k, q, b);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) emit_scores(s, par, w, base + j, acc[j], ln);
}
// Level 8: rows of slab w (odd), columns of slab w - 1.
__device__ inline void scores_level8(Smem& s, int stage, int par, int w, const Lane& ln) {
  float acc[2][4] = {};
#pragma unroll 2
  for (int it = 0; it < 4; it++) {
    const ScoreRow r(s, stage, par, w, it, ln);
    uint4 k = r.k(), q = r.q(), b = r.column(w - 1);
    mma_bf16(acc[0], k.x, q.x, k.y, q.y, b.x, b.y);
    mma_bf16(acc[1], k.z, q.z, k.w, q.w, b.z, b.w);
  }
#pragma unroll
  for (int n = 0; n < 4; n++) acc[0][n] += acc[1][n];
  emit_scores(s, par, w, w - 1, acc[0], ln);
}

// One tile's rows of slab w times a table, in place: all reads, then all writes.
__device__ inline void scale_rows(uint8_t* tile, int w, const uint4 (&f)[4], const Lane& ln) {
  uint4 x[4];
  uint8_t* p = tile + (8 * w + ln.row) * 128;
#pragma unroll
  for (int it = 0; it < 4; it++) x[it] = *reinterpret_cast<const uint4*>(p + step_offset(ln, it));
#pragma unroll
  for (int it = 0; it < 4; it++)
    *reinterpret_cast<uint4*>(p + step_offset(ln, it)) = mul_bf16x8(x[it], f[it]);
}
// q exp(G), k exp(G), k exp(G_last - G) of slab w, once no warp reads the slab's factors any more.
__device__ inline void finish_operands(Smem& s, int stage, int par, int w, const Lane& ln) {
  const Scratch& tab = *reinterpret_cast<const Scratch*>(s.t[par]);
  uint4 f[4];
  auto table = [&](const __nv_bfloat16(&row)[kWidth]) {
#pragma unroll
    for (int it = 0; it < 4; it++)
      f[it] = *reinterpret_cast<const uint4*>(row + step_channel(ln, it));
  };
  if (w > 0) {
    table(tab.prefix[w - 1]);
    scale_rows(s.k[stage], w, f, ln);
    scale_rows(s.q[stage], w, f, ln);
  }
  if (w < 7) {
    table(tab.suffix[w]);
    scale_rows(s.g[stage], w, f, ln);
  }
}

// Blocks of slab w's rows of the inverse, in its half of the chunk and (slabs 4..7) in the first
// half.
struct InverseRow {
  float own[4][2];
};

// Level 8: T[w][w-1] = -(T[w][w] L[w][w-1]) T[w-1][w-1]; and the diagonal block where the others
// look for it.
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
// Rows of slab w of diag(1/|k|) T diag(beta/|k|); zeros to the right, where scratch was.
// Slabs 4..7: level 32 first, T[w][n] = -sum_j (sum_i T[w][i] L[i][j]) T[j][n] for the columns of
// the first half.
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
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 b = load_block(s.l_block[l_index(4 + n, j)], ln);
        mma_tf32_8x8(y[j], r.own[n], make_float2(n <= i ? b.x : 0.f, n <= i ? b.y : 0.f));
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

// Named barriers of the eight warps; 1 and 2 belong to one carrying warpgroup each, 3 and 4 to the
// slab stage.
enum MergeBarrier { kScoresDone = 5, kLevel8Done, kLevel16Done, kOperandsDone };

// All of it. Leaves the chunk's operands visible to the tensor cores for all eight warps.
// after_scores runs behind the first barrier of all eight warps.
template <class F>
__device__ inline void merge_chunk(Smem& s, int c, F after_scores) {
  const int stage = c % kStages, par = c & 1, tid = thread_index();
  const Lane ln(tid);
  const int p = (tid - kSlabThreads) / 32, i = p < 4 ? 3 - p : p - 4;  // slab 4 + i, or i
  if (p < 4) {
    if (i)
      scores_level32<true>(s, stage, par, i, ln);
    else
      scores_level32<false>(s, stage, par, i, ln);
  } else {
    if (i & 1)
      scores_level16<true>(s, stage, par, 2 * (i & 2), ln);
    else
      scores_level16<false>(s, stage, par, 2 * (i & 2), ln);
    scores_level8(s, stage, par, 2 * i + 1, ln);
  }
  named_sync(kScoresDone, kCarryThreads);  // L blocks; nobody reads another slab's k S8 any more
  after_scores();
  InverseRow r;
  if (p < 4)
    inverse_level8<true>(s, par, i, ln, r);
  else
    inverse_level8<false>(s, par, i, ln, r);
  named_sync(kLevel8Done, kCarryThreads);
  if (p < 4)
    inverse_level16<true>(s, i, ln, r);
  else
    inverse_level16<false>(s, i, ln, r);
  named_sync(kLevel16Done, kCarryThreads);
  if (p < 4) {  // the inverse's second half is as long as finishing all operands
    store_inverse<true>(s, par, i, ln, r);
  } else {
    finish_operands(s, stage, par, 4 + i, ln);
    finish_operands(s, stage, par, i, ln);
    named_sync(2, 128);  // prefix and suffix tables lie where rows 0..31 go
    store_inverse<false>(s, par, i, ln, r);
  }
  fence_async_proxy();
  named_sync(kOperandsDone, kCarryThreads);
}

}  // namespace deltic::gpu
