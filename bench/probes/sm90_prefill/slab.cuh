// First preparing stage (warpgroups 0 and 1): gates, norms, scores and inverse inside slabs of 8
// tokens.
//
// A warp owns a slab. Lane = 4 * row + x: token 8 w + row, and of every 64 channels the sixteen
// from 16 x on. A 16-byte read gives the operands of two mma k-steps, the same channels in all
// rows, so A and B agree on the (permuted) contraction index, and a lane overwrites only what it
// read itself.
//
// Every factor is a product of decays between the two tokens and a boundary between them, so
// nothing above 1 is formed for g <= 0. Level h (1, 2, 4 here; 8, 16, 32 in merge.cuh) pairs the
// upper halves of blocks of 2 h tokens (rows) with the lower halves (columns).
#pragma once
#include "ptx.cuh"
#include "smem.h"

namespace deltic::gpu {

// Read anew in every chunk: else dozens of addresses that depend on it are kept, and spilled,
// across chunks.
__device__ inline int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
struct Lane {
  int id, row, x;
  __device__ explicit Lane(int tid) : id(tid % 32), row(id / 4), x(id % 4) {}
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

// An 8 x 8 block in accumulator layout, stored so that lane (row, x) reads M[2x][row], M[2x+1][row]
// as one pair.
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

// Decay factors e = exp(g) of two times four channels. Bounded: two MUFU and half a reciprocal
// each.
template <Gate kGate>
__device__ inline void gate_factors(const uint32_t (&raw)[2][2], const float* bias, GateParams p,
                                    float (&e)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t r = raw[i / 4][i % 4 / 2];
    e[i / 4][i % 4] = i % 2 ? bf16_hi(r) : bf16_lo(r);
  }
  if constexpr (kGate == Gate::kBounded) {
    float4 b4 = *reinterpret_cast<const float4*>(bias),
           c4 = *reinterpret_cast<const float4*>(bias + 16);
    const float b[8] = {b4.x, b4.y, b4.z, b4.w, c4.x, c4.y, c4.z, c4.w};
    float* d = &e[0][0];
#pragma unroll
    for (int i = 0; i < 8; i++) d[i] = exp2_approx(fminf(fmaf(d[i], p.slope, b[i]), 60.f));
#pragma unroll
    for (int i = 0; i < 8; i++) d[i] += 1.f;
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = rcp_approx(d[2 * i] * d[2 * i + 1]) * p.bound;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = r[i] * d[2 * i + 1], y = r[i] * d[2 * i];
      d[2 * i] = exp2_approx(x), d[2 * i + 1] = exp2_approx(y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      e[i / 4][i % 4] = exp2_approx(fmaxf(e[i / 4][i % 4], -104.f) * 1.4426950408889634f);
  }
}

struct SlabScores {
  float plain[4], qq[4];         // k k^T and q k^T; q q^T: diagonals used
  float lv1[4], lv2[4], lv4[4];  // [0,1]: k rows, [2,3]: q rows
};

// Two k-steps (four channels of each per lane), step by step over all eight so that little latency
// is waited for, with accumulators of their own: scores inside the slab; k, q and g become k P8, q
// P8 and k S8; and the slab's totals.
__device__ inline void slab_levels(uint32_t (&k)[2][2], uint32_t (&q)[2][2], uint32_t (&g)[2][2],
                                   const float (&e)[2][4], const Lane& ln, SlabScores (&s)[2],
                                   float (&total)[2][4]) {
  const bool b0 = ln.row & 1, b1 = ln.row & 2, b2 = ln.row & 4;
  float to_end[2][4], from_start[2][4], other[2][4];
  uint32_t f[2][2];
  auto exchange = [&](const float(&x)[2][4], int mask) {
#pragma unroll
    for (int i = 0; i < 8; i++) other[i / 4][i % 4] = __shfl_xor_sync(~0u, x[i / 4][i % 4], mask);
  };
  auto level = [&](float(&acc0)[4], float(&acc1)[4]) {
    uint32_t a[2][2], b[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i / 2][i % 2] = mul_bf16x2(k[i / 2][i % 2], f[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < 4; i++) b[i / 2][i % 2] = mul_bf16x2(q[i / 2][i % 2], f[i / 2][i % 2]);
    mma_bf16(acc0, a[0][0], b[0][0], a[0][1], b[0][1], a[0][0], a[0][1]);
    mma_bf16(acc1, a[1][0], b[1][0], a[1][1], b[1][1], a[1][0], a[1][1]);
  };
  exchange(e, 4);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    mma_bf16(s[j].plain, k[j][0], q[j][0], k[j][1], q[j][1], k[j][0], k[j][1]);
    mma_bf16(s[0].qq, q[j][0], 0, q[j][1], 0, q[j][0], q[j][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    f[i / 2][i % 2] =
        b0 ? pack_bf16(e[i / 2][2 * (i % 2)], e[i / 2][2 * (i % 2) + 1]) : 0x3F803F80u;
  level(s[0].lv1, s[1].lv1);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int j = i / 4, n = i % 4;
    total[j][n] = e[j][n] * other[j][n];
    from_start[j][n] = b0 ? total[j][n] : e[j][n];
    to_end[j][n] = b0 ? 1.f : other[j][n];
  }
  exchange(total, 8);
  auto factors = [&](bool upper) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = i / 2, n = 2 * (i % 2);
      f[j][i % 2] = pack_bf16(upper ? from_start[j][n] : to_end[j][n],
                              upper ? from_start[j][n + 1] : to_end[j][n + 1]);
    }
  };
  auto grow = [&](bool upper) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int j = i / 4, n = i % 4;
      total[j][n] *= other[j][n];
      if (upper)
        from_start[j][n] *= other[j][n];
      else
        to_end[j][n] *= other[j][n];
    }
  };
  factors(b1);
  level(s[0].lv2, s[1].lv2);
  grow(b1);
  exchange(total, 16);
  factors(b2);
  level(s[0].lv4, s[1].lv4);
  grow(b2);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int j = i / 2, n = i % 2;
    g[j][n] = mul_bf16x2(k[j][n], pack_bf16(to_end[j][2 * n], to_end[j][2 * n + 1]));
    uint32_t p = pack_bf16(from_start[j][2 * n], from_start[j][2 * n + 1]);
    k[j][n] = mul_bf16x2(k[j][n], p);
    q[j][n] = mul_bf16x2(q[j][n], p);
  }
}

// The slab over all channels. In: raw tiles. Out: k P8, q P8, k S8 in place, totals; scores in
// registers.
template <Gate kGate>
__device__ inline void walk_slab(Smem& s, int stage, int w, GateParams gp, const Lane& ln,
                                 SlabScores (&sc)[2]) {
#pragma unroll 1
  for (int it = 0; it < 4; it++) {
    const uint32_t off = (8 * w + ln.row) * 128 + step_offset(ln, it);
    const int channel = step_channel(ln, it);
    uint32_t k[2][2], q[2][2], g[2][2];
    auto get = [&](const uint8_t* tile, uint32_t(&r)[2][2]) {
      uint4 v = *reinterpret_cast<const uint4*>(tile + off);
      r[0][0] = v.x, r[0][1] = v.y, r[1][0] = v.z, r[1][1] = v.w;
    };
    auto put = [&](uint8_t* tile, const uint32_t(&r)[2][2]) {
      *reinterpret_cast<uint4*>(tile + off) = make_uint4(r[0][0], r[0][1], r[1][0], r[1][1]);
    };
    get(s.g[stage], g);
    get(s.k[stage], k);
    get(s.q[stage], q);
    float e[2][4], total[2][4];
    gate_factors<kGate>(g, &s.bias[32 * it + 4 * ln.x], gp, e);
    slab_levels(k, q, g, e, ln, sc, total);
    put(s.g[stage], g);
    put(s.k[stage], k);
    put(s.q[stage], q);
    if (ln.row == 0) {
#pragma unroll
      for (int j = 0; j < 2; j++)
        *reinterpret_cast<float4*>(&s.total[w][channel + 4 * j]) =
            make_float4(total[j][0], total[j][1], total[j][2], total[j][3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sc[0].plain[i] += sc[1].plain[i];
    sc[0].lv1[i] += sc[1].lv1[i];
    sc[0].lv2[i] += sc[1].lv2[i];
    sc[0].lv4[i] += sc[1].lv4[i];
  }
}

// Rows past the sequence's end: k = q = 0 and a raw gate whose decay is 1.
template <Gate kGate>
__device__ inline void clear_rows(Smem& s, int stage, int w, int rest, const Lane& ln) {
  const uint32_t one = kGate == Gate::kBounded ? 0xFF80FF80u : 0u;  // -inf: sigmoid is 0
  const int token = 8 * w + ln.row;
  if (token < rest) return;
#pragma unroll 1
  for (int it = 0; it < 4; it++) {
    const uint32_t off = token * 128 + step_offset(ln, it);
    *reinterpret_cast<uint4*>(s.k[stage] + off) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.q[stage] + off) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.g[stage] + off) = uint4{one, one, one, one};
  }
}

// Row scales, the diagonal block of Aqk, and the inverse of the diagonal block of I + L
// (substitution, fp32).
__device__ inline void finish_slab(Smem& s, int par, int w, const SlabScores& sc, float beta,
                                   float scale, const Lane& ln) {
  // The diagonal of an 8 x 8 accumulator lies in lane 4 row + row / 2.
  auto diagonal = [&](float a, float b) {
    return __shfl_sync(~0u, ln.row & 1 ? b : a, (ln.id & ~3) | (ln.row >> 1));
  };
  const float kk = diagonal(sc.plain[0], sc.plain[1]) + 1e-6f, rk = rsqrtf(kk);
  const float rq = rsqrtf(diagonal(sc.qq[0], sc.qq[1]) + 1e-6f);
  if (ln.x == 0) {
    int t = 8 * w + ln.row;
    s.k_scale[par][t] = rk;
    s.v_scale[par][t] = kk * rk;
    s.o_scale[par][t] = scale * rq;
    s.beta_k[par][t] = beta * rk;
  }
  // Select, never multiply, what each level owns.
  float aqk[2], l[2], x[2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int col = 2 * ln.x + n, d = ln.row ^ col;
    const bool below = ln.row > col;
    float lk = d & 4 ? sc.lv4[n] : d & 2 ? sc.lv2[n] : sc.lv1[n];
    float lq = d & 4 ? sc.lv4[2 + n] : d & 2 ? sc.lv2[2 + n] : sc.lv1[2 + n];
    const float rk_col = __shfl_sync(~0u, rk, 4 * col);
    l[n] = below ? lk * beta * rk * rk_col : 0.f;
    aqk[n] = below ? lq : d == 0 ? sc.plain[2 + n] : 0.f;
    x[n] = d == 0 ? 1.f : 0.f;
  }
  *reinterpret_cast<uint32_t*>(s.aqk[par] + swizzled(8 * w + ln.row, w) + 4 * ln.x) =
      pack_bf16(aqk[0], aqk[1]);
#pragma unroll
  for (int r = 0; r < 7; r++) {
    float f = __shfl_sync(~0u, l[r & 1], (ln.id & ~3) | (r >> 1));
    float y0 = __shfl_sync(~0u, x[0], 4 * r + ln.x), y1 = __shfl_sync(~0u, x[1], 4 * r + ln.x);
    x[0] -= f * y0;
    x[1] -= f * y1;
  }
  store_block(reinterpret_cast<Scratch*>(s.t[par])->inverse[w], ln, x[0], x[1]);
}

// Decay tables of all slabs: 256 threads, two per channel.
__device__ inline void build_tables(Smem& s, int par, int tid) {
  const int channel = tid % kWidth;
  float t[kSlabs];
#pragma unroll
  for (int w = 0; w < kSlabs; w++) t[w] = s.total[w][channel];
  Scratch& tab = *reinterpret_cast<Scratch*>(s.t[par]);
  auto put = [&](__nv_bfloat16(&row)[kWidth], float f) { row[channel] = __float2bfloat16_rn(f); };
  if (tid < kWidth) {
    float f = t[0];
#pragma unroll
    for (int w = 1; w < kSlabs; w++) {
      put(tab.prefix[w - 1], f);
      f *= t[w];
    }
    s.decay[par][channel] = f;
    put(tab.level16[0], t[1]);
    put(tab.level16[1], t[2]);
    put(tab.level16[2], t[5]);
    put(tab.level16[3], t[6]);
  } else {
    float f = t[7];
#pragma unroll
    for (int w = kSlabs - 2; w >= 0; w--) {
      put(tab.suffix[w], f);
      f *= t[w];
    }
    put(tab.level32[2], t[3]);
    put(tab.level32[1], t[2] * t[3]);
    put(tab.level32[0], t[1] * t[2] * t[3]);
    put(tab.level32[3], t[4]);
    put(tab.level32[4], t[4] * t[5]);
    put(tab.level32[5], t[4] * t[5] * t[6]);
  }
}

}  // namespace deltic::gpu
