// Products of a tile's rows with decays between them. Called by a warp; reads shared memory that is
// complete, writes accumulators.
//
// Groups are eight tokens. An accumulator c[4] is an 8 x 8 block of k k^T (c[0], c[1]: row lane /
// 4, columns 2 (lane % 4) and the next) and of q k^T (c[2], c[3]: likewise).
//
// Decays per channel: for a pair i > j the level is the highest bit in which they differ, and the
// boundary is where that bit changes. The row's factor is the decay from the boundary to i, the
// column's from j to the boundary: neither exceeds 1 for gates <= 0, whatever the gates are, and
// nothing is clamped. Levels 32, 16 and 8 are blocks of whole groups. Levels 4, 2 and 1 lie inside
// of a group, where a lane's token is a row or a column: one value serves as both factors, and
// entries of other levels are selected away.
#pragma once

#include "cuda/ptx/numbers.cuh"
#include "cuda/sm80/scores/params.h"
#include "cuda/sm80/scores/traits.h"

namespace deltic::gpu::scores {

inline constexpr float kLog2e = 1.44269504f;

template <class Tr>
struct Products {
  using E = typename Tr::E;
  using Fragment = typename Tr::Fragment;
  using RawFragment = typename Tr::RawFragment;

  // The lane's place in the tile's rows: its first four channels of token 0 + lane / 4.
  const unsigned char *k, *q, *g;
  // g: of token 0 and, with the levels inside of a group, of the last token before the lane's
  // boundary (in the first group).
  const unsigned char* references[3];
  int runtime_pitch, runtime_g_pitch;
  int token;       // of the group, lane / 4
  float signs[3];  // log2 e where the lane's token is a row of the level, else -log2 e

  __device__ Products(const Params& p, const unsigned char* smem, int lane)
      : runtime_pitch(p.row_bytes), runtime_g_pitch(p.g_row_bytes), token(lane / 4) {
    const int channels = lane % 4 * 4;
    k = smem + token * pitch() + channels * static_cast<int>(sizeof(E));
    q = k + p.q_at;
    g = smem + p.g_at + channels * static_cast<int>(sizeof(float));
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int level = 4 >> n, boundary = token / (2 * level) * (2 * level) + level;
      references[n] = g + (boundary - 1) * g_pitch();
      signs[n] = (token & level) != 0 ? kLog2e : -kLog2e;
    }
  }
  __device__ int pitch() const {
    return Tr::kWidth > 0 ? row_bytes(Tr::kWidth, sizeof(E)) : runtime_pitch;
  }
  __device__ int g_pitch() const {
    return Tr::kWidth > 0 ? row_bytes(Tr::kWidth, 4) : runtime_g_pitch;
  }

  // Four channels of step s (16 channels) of a group's token.
  __device__ RawFragment raw(const unsigned char* x, int group, int s) const {
    const unsigned char* at = x + group * 8 * pitch() + s * 16 * static_cast<int>(sizeof(E));
    return *reinterpret_cast<const RawFragment*>(at);
  }
  __device__ void unpacked(const unsigned char* x, int group, int s, float (&out)[4]) const {
    const RawFragment f = raw(x, group, s);
    if constexpr (Tr::kIsFloat) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = f.x[e];
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto bits = static_cast<uint16_t>(f.x[e / 2] >> (e % 2 * 16));
        if constexpr (__is_same(E, __half)) {
          out[e] = __half2float(__ushort_as_half(bits));
        } else {
          out[e] = __uint_as_float(static_cast<uint32_t>(bits) << 16);
        }
      }
    }
  }
  static __device__ Fragment packed(const float (&x)[4], const float (&factor)[4]) {
    Fragment f;
    if constexpr (Tr::kIsFloat) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f.x[e] = x[e] * factor[e];
    } else if constexpr (Tr::kIsTf32) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f.x[e] = x[e] * factor[e];  // cut: 2^-12 on average
    } else {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(x[e] * factor[e], x[e + 1] * factor[e + 1]);
        f.x[e / 2] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
    return f;
  }
  static __device__ void multiply(float (&c)[4], const Fragment& upper, const Fragment& lower,
                                  const Fragment& columns) {
    if constexpr (Tr::kIsFloat) {
      mma_3xtf32(c, upper, lower, columns);
    } else if constexpr (Tr::kIsTf32) {
      mma_1xtf32(c, upper, lower, columns);
    } else {
      mma<E>(c, upper, lower, columns);
    }
  }

  // G of four channels. Rows past the tile's tokens repeat its last one: no decay runs over.
  static __device__ void gates(const unsigned char* row, int s, float (&out)[4]) {
    const float4 x = *reinterpret_cast<const float4*>(row + s * 64);
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
  }
  __device__ const unsigned char* gate_row(int row) const { return g + row * g_pitch(); }

  // exp(G - reference), or exp(reference - G) where sign_log2e is negative.
  static __device__ void factors(const float (&G)[4], const float (&reference)[4], float sign_log2e,
                                 float (&out)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[e] = exp2_approx((G[e] - reference[e]) * sign_log2e);
  }
  // The same with a reference that several groups have, `scaled` by log2 e: one instruction less.
  // G times log2 e is off by 4e-4 at the deepest G there is (-6656), too much for fp32 alone.
  template <int kSign>
  static __device__ void block_factors(const float (&G)[4], const float (&reference)[4],
                                       const float (&scaled)[4], float (&out)[4]) {
    if constexpr (Tr::kIsFloat) {
      factors(G, reference, kSign * kLog2e, out);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out[e] = exp2_approx(fmaf(G[e], kSign * kLog2e, -kSign * scaled[e]));
      }
    }
  }

  // A group's operands on one side of a boundary.
  __device__ void row_operands(int group, int s, const float (&reference)[4],
                               const float (&scaled)[4], Fragment& fk, Fragment& fq) const {
    float G[4], factor[4], x[4];
    gates(gate_row(group * 8 + token), s, G);
    block_factors<1>(G, reference, scaled, factor);
    if constexpr (Tr::kHasK) {
      unpacked(k, group, s, x);
      fk = packed(x, factor);
    }
    if constexpr (Tr::kHasQ) {
      unpacked(q, group, s, x);
      fq = packed(x, factor);
    }
  }
  __device__ Fragment column_operand(int group, int s, const float (&reference)[4],
                                     const float (&scaled)[4]) const {
    float G[4], factor[4], x[4];
    gates(gate_row(group * 8 + token), s, G);
    block_factors<-1>(G, reference, scaled, factor);
    unpacked(k, group, s, x);
    return packed(x, factor);
  }

  // Groups of rows [row, row + kRows) and of columns [column, column + kColumns) on the two sides
  // of a boundary, before group `boundary`.
  template <int kRows, int kColumns>
  __device__ void block(int row, int boundary, int column, int s,
                        float (&c)[kRows][kColumns][4]) const {
    float ref[4], scaled[4];
    gates(gate_row(boundary * 8 - 1), s, ref);
#pragma unroll
    for (int e = 0; e < 4; ++e) scaled[e] = ref[e] * kLog2e;
    // Rows have two operands each; the side with fewer registers waits for the other.
    if constexpr (2 * kRows < kColumns + 1) {
      Fragment fk[kRows] = {}, fq[kRows] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) row_operands(row + i, s, ref, scaled, fk[i], fq[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const Fragment columns = column_operand(column + j, s, ref, scaled);
#pragma unroll
        for (int i = 0; i < kRows; ++i) multiply(c[i][j], fk[i], fq[i], columns);
      }
    } else {
      Fragment columns[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) columns[j] = column_operand(column + j, s, ref, scaled);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Fragment fk{}, fq{};
        row_operands(row + i, s, ref, scaled, fk, fq);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) multiply(c[i][j], fk, fq, columns[j]);
      }
    }
  }

  // Levels 4, 2 and 1 inside of a group: c[0], c[1], c[2]. diagonal: the lane's part of (q_i, k_i).
  __device__ void inside(int group, int s, float (&c)[3][4], float& diagonal) const {
    float xk[4], xq[4], G[4];
    unpacked(k, group, s, xk);
    if constexpr (Tr::kHasQ) {
      unpacked(q, group, s, xq);
#pragma unroll
      for (int e = 0; e < 4; ++e) diagonal += xq[e] * xk[e];
    }
    gates(gate_row(group * 8 + token), s, G);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      float ref[4], factor[4];
      gates(references[n] + group * 8 * g_pitch(), s, ref);
      factors(G, ref, signs[n], factor);
      const Fragment fk = packed(xk, factor);
      Fragment fq{};
      if constexpr (Tr::kHasQ) fq = packed(xq, factor);
      multiply(c[n], fk, fq, fk);
    }
  }
};

}  // namespace deltic::gpu::scores
