// First preparing stage (warpgroup 0): gates, norms, scores and inverse inside slabs of 8 tokens.
//
// A warp owns two slabs. Lane = 4 * row + x: token 8 w + row, and of every 64 channels the sixteen from 16 x on. A 16-byte
// read gives the operands of two mma k-steps, the same channels in all rows, so A and B agree on the (permuted)
// contraction index, and a lane overwrites only what it read itself.
//
// Every factor is a product of decays between the two tokens and a boundary between them, so nothing above 1
// is formed for g <= 0. Level h (1, 2, 4 here; 8, 16, 32 in merge.cuh) pairs the upper halves of blocks of 2 h tokens
// (rows) with the lower halves (columns).
#pragma once
#include "ptx.cuh"
#include "smem.h"

namespace deltic::gpu {

struct Lane {
  int id, row, x;
  __device__ Lane() : id(threadIdx.x % 32), row(id / 4), x(id % 4) {}
};

// Byte offset in a 64 x 64 half tile.
__device__ inline uint32_t swizzled(int row, int chunk16) {
  return row * 128 + ((chunk16 ^ (row & 7)) << 4);
}
// Byte offset of the lane's 8 channels of step it (0..3), without the row's 128 bytes.
__device__ inline uint32_t step_offset(const Lane& ln, int it) {
  return (it >> 1) * kHalf + (((2 * ln.x + (it & 1)) ^ ln.row) << 4);
}
__device__ inline int step_channel(const Lane& ln, int it) {
  return (it >> 1) * 64 + 16 * ln.x + 8 * (it & 1);
}

// An 8 x 8 block in accumulator layout, stored so that lane (row, x) reads M[2x][row], M[2x+1][row] as one pair.
__device__ inline int block_index(const Lane& ln) {
  return (ln.row >> 1) * 16 + 4 * ln.x + (ln.row & 1);
}
__device__ inline void store_block(float* block, const Lane& ln, float m0, float m1) {
  block[block_index(ln)] = __uint_as_float(to_tf32(m0));
  block[block_index(ln) + 2] = __uint_as_float(to_tf32(m1));
}
__device__ inline float2 load_block(const float* block, const Lane& ln) {
  return *reinterpret_cast<const float2*>(block + (ln.x * 8 + ln.row) * 2);
}

struct GateParams {
  float slope, bound;  // bounded: -exp(A_log) log2e, lower_bound log2e
};

// Decay factors e = exp(g) of four channels. Bounded: two MUFU and half a reciprocal per channel.
template <Gate kGate>
__device__ inline void gate_factors(uint32_t g01, uint32_t g23, const float* bias, GateParams p,
                                    float (&e)[4]) {
  float g[4] = {bf16_lo(g01), bf16_hi(g01), bf16_lo(g23), bf16_hi(g23)};
  if constexpr (kGate == Gate::kBounded) {
    float4 b = *reinterpret_cast<const float4*>(bias);
    float d[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 1.f + exp2_approx(fminf(fmaf(g[i], p.slope, d[i]), 60.f));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float r = rcp_approx(d[i] * d[i + 1]) * p.bound;
      e[i] = exp2_approx(r * d[i + 1]);
      e[i + 1] = exp2_approx(r * d[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) e[i] = exp2_approx(fmaxf(g[i], -104.f) * 1.4426950408889634f);
  }
}

struct SlabScores {
  float plain[4];                // k k^T and q k^T, diagonal used
  float lv1[4], lv2[4], lv4[4];  // [0,1]: k rows, [2,3]: q rows
};

// One k-step (four channels per lane): scores inside the slab; the factors to the slab's two ends and its total.
__device__ inline void slab_levels(uint32_t k0, uint32_t k1, uint32_t q0, uint32_t q1,
                                   const float (&e)[4], const Lane& ln, SlabScores& s,
                                   float (&to_end)[4], float (&from_start)[4], float (&total)[4]) {
  const bool b0 = ln.row & 1, b1 = ln.row & 2, b2 = ln.row & 4;
  mma_bf16(s.plain, k0, q0, k1, q1, k0, k1);
  auto level = [&](float(&acc)[4], uint32_t f0, uint32_t f1) {
    uint32_t a0 = mul_bf16x2(k0, f0), a1 = mul_bf16x2(k1, f1);
    mma_bf16(acc, a0, mul_bf16x2(q0, f0), a1, mul_bf16x2(q1, f1), a0, a1);
  };
  const uint32_t one = 0x3F803F80u;
  level(s.lv1, b0 ? pack_bf16(e[0], e[1]) : one, b0 ? pack_bf16(e[2], e[3]) : one);
  float f[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float other = __shfl_xor_sync(~0u, e[i], 4);
    total[i] = e[i] * other;
    from_start[i] = b0 ? total[i] : e[i];
    to_end[i] = b0 ? 1.f : other;
    f[i] = b1 ? from_start[i] : to_end[i];
  }
  level(s.lv2, pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float other = __shfl_xor_sync(~0u, total[i], 8);
    total[i] *= other;
    if (b1) from_start[i] *= other; else to_end[i] *= other;
    f[i] = b2 ? from_start[i] : to_end[i];
  }
  level(s.lv4, pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float other = __shfl_xor_sync(~0u, total[i], 16);
    total[i] *= other;
    if (b2) from_start[i] *= other; else to_end[i] *= other;
  }
}

// Both slabs of the warp over all channels. In: raw tiles. Out: k P8, q P8, k S8 in place, totals; scores in registers.
template <Gate kGate>
__device__ inline void walk_slabs(Smem& s, int stage, int warp, GateParams gp, const Lane& ln,
                                  SlabScores (&sc)[2], float (&qq)[4]) {
  const uint32_t row_off = (16 * warp + ln.row) * 128;
#pragma unroll 1
  for (int it = 0; it < 4; it++) {
    const uint32_t off = row_off + step_offset(ln, it);
    const int channel = step_channel(ln, it);
    uint4 k[2], q[2], g[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      g[j] = *reinterpret_cast<const uint4*>(s.g[stage] + off + 1024 * j);
      k[j] = *reinterpret_cast<const uint4*>(s.k[stage] + off + 1024 * j);
      q[j] = *reinterpret_cast<const uint4*>(s.q[stage] + off + 1024 * j);
    }
    mma_bf16(qq, q[0].x, 0, q[0].y, 0, q[0].x, q[0].y);
    mma_bf16(qq, q[0].z, 0, q[0].w, 0, q[0].z, q[0].w);
    mma_bf16(qq, 0, q[1].x, 0, q[1].y, q[1].x, q[1].y);
    mma_bf16(qq, 0, q[1].z, 0, q[1].w, q[1].z, q[1].w);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t &k0 = half ? k[j].z : k[j].x, &k1 = half ? k[j].w : k[j].y;
        uint32_t &q0 = half ? q[j].z : q[j].x, &q1 = half ? q[j].w : q[j].y;
        uint32_t &g0 = half ? g[j].z : g[j].x, &g1 = half ? g[j].w : g[j].y;
        float e[4], to_end[4], from_start[4], total[4];
        gate_factors<kGate>(g0, g1, &s.bias[channel + 4 * half], gp, e);
        slab_levels(k0, k1, q0, q1, e, ln, sc[j], to_end, from_start, total);
        uint32_t p0 = pack_bf16(from_start[0], from_start[1]),
                 p1 = pack_bf16(from_start[2], from_start[3]);
        g0 = mul_bf16x2(k0, pack_bf16(to_end[0], to_end[1]));
        g1 = mul_bf16x2(k1, pack_bf16(to_end[2], to_end[3]));
        k0 = mul_bf16x2(k0, p0), k1 = mul_bf16x2(k1, p1);
        q0 = mul_bf16x2(q0, p0), q1 = mul_bf16x2(q1, p1);
        if (ln.row == 0)
          *reinterpret_cast<float4*>(&s.total[2 * warp + j][channel + 4 * half]) =
              make_float4(total[0], total[1], total[2], total[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      *reinterpret_cast<uint4*>(s.g[stage] + off + 1024 * j) = g[j];
      *reinterpret_cast<uint4*>(s.k[stage] + off + 1024 * j) = k[j];
      *reinterpret_cast<uint4*>(s.q[stage] + off + 1024 * j) = q[j];
    }
  }
}

// Rows past the sequence's end: k = q = 0 and a raw gate whose decay is 1.
template <Gate kGate>
__device__ inline void clear_rows(Smem& s, int stage, int warp, int rest, const Lane& ln) {
  const uint32_t one = kGate == Gate::kBounded ? 0xFF80FF80u : 0u;  // -inf: sigmoid is 0
#pragma unroll 1
  for (int j = 0; j < 8; j++) {
    const int token = 16 * warp + 8 * (j & 1) + ln.row;
    const uint32_t off = token * 128 + step_offset(ln, j >> 1);
    if (token < rest) continue;
    *reinterpret_cast<uint4*>(s.k[stage] + off) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.q[stage] + off) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.g[stage] + off) = uint4{one, one, one, one};
  }
}

// Inverse of I + l for one 8 x 8 block by substitution, fp32.
__device__ inline void invert_block(const float (&l)[2], const Lane& ln, float (&x)[2]) {
  x[0] = ln.row == 2 * ln.x ? 1.f : 0.f;
  x[1] = ln.row == 2 * ln.x + 1 ? 1.f : 0.f;
#pragma unroll
  for (int r = 0; r < 7; r++) {
    float f = __shfl_sync(~0u, r & 1 ? l[1] : l[0], (ln.id & ~3) | (r >> 1));
    float y0 = __shfl_sync(~0u, x[0], 4 * r + ln.x), y1 = __shfl_sync(~0u, x[1], 4 * r + ln.x);
    x[0] -= f * y0;
    x[1] -= f * y1;
  }
}

// Row scales, the diagonal block of Aqk, and the inverse of the diagonal block of I + L. qq: this slab's diagonal q q^T pair.
__device__ inline void finish_slab(Smem& s, int par, int w, const SlabScores& sc, float qq0,
                                   float qq1, float beta, float scale, const Lane& ln) {
  // The diagonal of an 8 x 8 accumulator lies in lane 4 row + row / 2.
  auto diagonal = [&](float a, float b) {
    return __shfl_sync(~0u, ln.row & 1 ? b : a, (ln.id & ~3) | (ln.row >> 1));
  };
  const float kk = diagonal(sc.plain[0], sc.plain[1]) + 1e-6f, rk = rsqrtf(kk);
  const float rq = rsqrtf(diagonal(qq0, qq1) + 1e-6f);
  if (ln.x == 0) {
    int t = 8 * w + ln.row;
    s.k_scale[par][t] = rk;
    s.v_scale[par][t] = kk * rk;
    s.o_scale[par][t] = scale * rq;
    s.beta_k[par][t] = beta * rk;
  }
  // Select, never multiply, what each level owns.
  float l[2], aqk[2], x[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int col = 2 * ln.x + j, d = ln.row ^ col;
    const bool below = ln.row > col;
    float lk = d & 4 ? sc.lv4[j] : d & 2 ? sc.lv2[j] : sc.lv1[j];
    float lq = d & 4 ? sc.lv4[2 + j] : d & 2 ? sc.lv2[2 + j] : sc.lv1[2 + j];
    const float rk_col = __shfl_sync(~0u, rk, 4 * col);
    l[j] = below ? lk * beta * rk * rk_col : 0.f;
    aqk[j] = below ? lq : d == 0 ? sc.plain[2 + j] : 0.f;
  }
  *reinterpret_cast<uint32_t*>(s.aqk[par] + swizzled(8 * w + ln.row, w) + 4 * ln.x) =
      pack_bf16(aqk[0], aqk[1]);
  invert_block(l, ln, x);
  store_block(reinterpret_cast<Scratch*>(s.t[par])->inverse[w], ln, x[0], x[1]);
}

// Decay tables of all slabs by the warpgroup, one channel per thread.
__device__ inline void build_tables(Smem& s, int par, int channel) {
  float t[kSlabs];
#pragma unroll
  for (int w = 0; w < kSlabs; w++) t[w] = s.total[w][channel];
  Scratch& tab = *reinterpret_cast<Scratch*>(s.t[par]);
  auto put = [&](__nv_bfloat16(&row)[kWidth], float f) { row[channel] = __float2bfloat16_rn(f); };
  float f = t[0];
#pragma unroll
  for (int w = 1; w < kSlabs; w++) {
    put(tab.prefix[w - 1], f);
    f *= t[w];
  }
  s.decay[par][channel] = f;
  f = t[7];
#pragma unroll
  for (int w = kSlabs - 2; w >= 0; w--) {
    put(tab.suffix[w], f);
    f *= t[w];
  }
  put(tab.level16[0], t[1]);
  put(tab.level16[1], t[2]);
  put(tab.level16[2], t[5]);
  put(tab.level16[3], t[6]);
  put(tab.level32[2], t[3]);
  put(tab.level32[1], t[2] * t[3]);
  put(tab.level32[0], t[1] * t[2] * t[3]);
  put(tab.level32[3], t[4]);
  put(tab.level32[4], t[4] * t[5]);
  put(tab.level32[5], t[4] * t[5] * t[6]);
}

}  // namespace deltic::gpu
