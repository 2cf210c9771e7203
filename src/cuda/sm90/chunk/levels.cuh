// Operands of the scores of a chunk with gates per channel, element by element, by eight warps.
//
// A thread owns 16 consecutive tokens of two adjacent channels, so products of decays run along
// registers. For a pair i > j the level h is the highest bit in which i and j differ; the row
// factor is the product of decays from the level's boundary to i, the column factor from j + 1 to
// the boundary: nothing above 1 is formed for g <= 0, and only tokens j + 1 .. i are looked at.
// Every level has 32 row tokens and 32 column tokens: one 64 x 32 x 128 product for k and q rows.
#pragma once

#include <cstdint>

#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/shared.cuh"

namespace deltic::gpu::chunk {

template <int kHalves>  // of 64 channels
struct LevelOf {        // of the 32 upper tokens k, then q; of the 32 lower tokens k
  uint8_t rows[kHalves * 64 * 128];
  uint8_t columns[kHalves * 32 * 128];
};
using Level = LevelOf<2>;

// Functions take any type that has these, k and q by index.
struct Rows {
  uint32_t k[16], q[16];
  float fs[16][2];  // product from the start of the token's block to the token
  float te[16][2];  // product from after the token to the end of its block
};

// Operands of level h inside 16 tokens, then blocks of 2 h. kQueries: are there any? (In a transfer
// there are none, and what stands in their place is multiplied for nothing.)
template <class E, bool kQueries, int h, class R>
__device__ inline void local_level(R& r, uint32_t rows, uint32_t columns, uint32_t lane4) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int tr = i / h * 2 * h + h + i % h, tc = i / h * 2 * h + i % h;
    const uint32_t at = i * 128 + (lane4 ^ (i << 4));
    const uint32_t f = pack<E>(r.fs[tr][0], r.fs[tr][1]);
    store_shared(rows + at, multiply_packed<E>(r.k[tr], f));
    if constexpr (kQueries) store_shared(rows + 32 * 128 + at, multiply_packed<E>(r.q[tr], f));
    uint32_t c = r.k[tc];
    if (i % h != h - 1) c = multiply_packed<E>(c, pack<E>(r.te[tc][0], r.te[tc][1]));
    store_shared(columns + at, c);
  }
#pragma unroll
  for (int b = 0; b < 8 / h; b++)
#pragma unroll
    for (int ch = 0; ch < 2; ch++) {
      const float lower = r.fs[2 * h * b + h - 1][ch], upper = r.fs[2 * h * b + 2 * h - 1][ch];
#pragma unroll
      for (int i = 0; i < h; i++) {
        float& te = r.te[2 * h * b + i][ch];
        te = i == h - 1 ? upper : te * upper;
        r.fs[2 * h * b + h + i][ch] *= lower;
      }
    }
}
// Operands of 16 tokens whose boundary lies f further on: rows (k and q) or columns (k).
template <class E, bool kQueries, class R>
__device__ inline void far_rows(const R& r, float2 f, uint32_t rows, uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t x = pack<E>(r.fs[t][0] * f.x, r.fs[t][1] * f.y);
    store_shared(rows + at, multiply_packed<E>(r.k[t], x));
    if constexpr (kQueries) store_shared(rows + 32 * 128 + at, multiply_packed<E>(r.q[t], x));
  }
}
template <class E, class R>
__device__ inline void far_columns(const R& r, float2 f, uint32_t columns, uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t x = t < 15 ? pack<E>(r.te[t][0] * f.x, r.te[t][1] * f.y) : pack<E>(f.x, f.y);
    store_shared(columns + at, multiply_packed<E>(r.k[t], x));
  }
}

struct RawTiles {  // addresses of a warp's 16 tokens and 64 channels
  uint32_t k, q, g;
};
// The packet's operands in the raw tiles' place. before, after: decay of the blocks before and
// after this one.
template <class E, bool kQueries>
__device__ inline void put_operands(const Rows& r, float2 before, float2 after, RawTiles to,
                                    uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t f = pack<E>(r.fs[t][0] * before.x, r.fs[t][1] * before.y);
    store_shared(to.k + at, multiply_packed<E>(r.k[t], f));
    if constexpr (kQueries) store_shared(to.q + at, multiply_packed<E>(r.q[t], f));
    store_shared(to.g + at,
                 multiply_packed<E>(r.k[t], pack<E>((t < 15 ? r.te[t][0] : 1.f) * after.x,
                                                    (t < 15 ? r.te[t][1] : 1.f) * after.y)));
  }
}
// Past the end: k = q = 0, decay 1.
__device__ inline void clear_rows(Rows& r, int tokens_left) {
#pragma unroll
  for (int t = 0; t < 16; t++)
    if (t >= tokens_left) r.k[t] = r.q[t] = 0, r.fs[t][0] = r.fs[t][1] = 1.f;
}

}  // namespace deltic::gpu::chunk
