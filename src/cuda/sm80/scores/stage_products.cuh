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
  int row_bytes, g_row_bytes, length;
  int token;  // of the group, lane / 4

  __device__ Products(const Params& p, const unsigned char* smem, int lane, int tile_length)
      : row_bytes(p.row_bytes), g_row_bytes(p.g_row_bytes), length(tile_length), token(lane / 4) {
    const int channels = lane % 4 * 4;
    k = smem + token * row_bytes + channels * static_cast<int>(sizeof(E));
    q = k + p.q_at;
    g = smem + p.g_at + channels * static_cast<int>(sizeof(float));
  }

  // Four channels of step s (16 channels) of a group's token.
  __device__ RawFragment raw(const unsigned char* x, int group, int s) const {
    const unsigned char* at = x + group * 8 * row_bytes + s * 16 * static_cast<int>(sizeof(E));
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
      for (int e = 0; e < 4; ++e) f.x[e] = round_to_tf32(x[e] * factor[e]);
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
  static __device__ void multiply(float (&c)[4], const Fragment& k_rows, const Fragment& q_rows,
                                  const Fragment& columns) {
    if constexpr (Tr::kIsFloat) {
      mma_3xtf32(c, k_rows, q_rows, columns);
    } else if constexpr (Tr::kIsTf32) {
      mma_tf32(c, k_rows, q_rows, columns);
    } else {
      mma<E>(c, k_rows, q_rows, columns);
    }
  }

  // G of a row of the tile, for fp32 as it is and else times log2 e: a rounding of 2^-24 G, which
  // is 4e-4 at the deepest G there is (-6656), too much for fp32 alone.
  __device__ void gates(int row, int s, float (&out)[4]) const {
    const float4 x = *reinterpret_cast<const float4*>(g + row * g_row_bytes + s * 64);
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
  }
  // The last row before a boundary. Past the tile's tokens nothing is kept, but the decay of a
  // column must not run over: there G is 0.
  __device__ int reference(int boundary) const { return min(boundary, length) - 1; }

  // exp(sign (G - reference)).
  static __device__ void factors(const float (&G)[4], const float (&reference)[4], float sign,
                                 float (&out)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x;
      if constexpr (Tr::kIsFloat) {
        x = (G[e] - reference[e]) * (sign * kLog2e);
      } else {
        x = G[e] * (sign * kLog2e) - reference[e] * (sign * kLog2e);
      }
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out[e]) : "f"(x));
    }
  }

  // A group's operands on one side of a boundary.
  __device__ void row_operands(int group, int s, const float (&reference)[4], Fragment& fk,
                               Fragment& fq) const {
    float G[4], factor[4], x[4];
    gates(group * 8 + token, s, G);
    factors(G, reference, 1.0f, factor);
    if constexpr (Tr::kHasK) {
      unpacked(k, group, s, x);
      fk = packed(x, factor);
    }
    if constexpr (Tr::kHasQ) {
      unpacked(q, group, s, x);
      fq = packed(x, factor);
    }
  }
  __device__ Fragment column_operand(int group, int s, const float (&reference)[4]) const {
    float G[4], factor[4], x[4];
    gates(group * 8 + token, s, G);
    factors(G, reference, -1.0f, factor);
    unpacked(k, group, s, x);
    return packed(x, factor);
  }

  // The block of n x n groups below a boundary: rows first + n .., columns first ...
  template <int n>
  __device__ void block(int first, int s, float (&c)[n][n][4]) const {
    float ref[4];
    gates(reference((first + n) * 8), s, ref);
    Fragment columns[n];
#pragma unroll
    for (int j = 0; j < n; ++j) columns[j] = column_operand(first + j, s, ref);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      Fragment fk{}, fq{};
      row_operands(first + n + i, s, ref, fk, fq);
#pragma unroll
      for (int j = 0; j < n; ++j) multiply(c[i][j], fk, fq, columns[j]);
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
    gates(group * 8 + token, s, G);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int level = 4 >> n;
      // The boundary of the lane's block of 2 * level tokens.
      const int boundary = group * 8 + token / (2 * level) * (2 * level) + level;
      float ref[4], factor[4];
      gates(reference(boundary), s, ref);
      factors(G, ref, (token & level) != 0 ? 1.0f : -1.0f, factor);
      const Fragment fk = packed(xk, factor);
      Fragment fq{};
      if constexpr (Tr::kHasQ) fq = packed(xq, factor);
      multiply(c[n], fk, fq, fk);
    }
  }
};

}  // namespace deltic::gpu::scores
