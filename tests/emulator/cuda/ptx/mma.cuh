// Emulated: matrix instructions of a warp, 16 x 8 outputs, fp32 sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cta.h"
#include "cuda/ptx/numbers.cuh"

namespace deltic::gpu {

// d (16 x 8) += a (16 x K) b (K x 8); words of two elements, or one of tf32: element(word, which).
template <int kA, bool kPairs>
void multiply_warp(float (&d)[4], const uint32_t (&a)[kA], const uint32_t (&b)[kA / 2],
                   auto element) {
  struct Own {
    float (*d)[4];
    uint32_t a[kA], b[kA / 2];
  } own{&d, {}, {}};
  for (int i = 0; i < kA; ++i) own.a[i] = a[i];
  for (int i = 0; i < kA / 2; ++i) own.b[i] = b[i];
  using Element = decltype(element);
  emulator::together(~0u, own, [](Own** lanes, uint32_t) {
    constexpr int kPer = kPairs ? 2 : 1, kBlock = 4 * kPer, kDepth = kA / 2 * kBlock;
    float A[16][kDepth], B[kDepth][8];
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, x = l % 4;
      for (int i = 0; i < kA; ++i)
        for (int e = 0; e < kPer; ++e)
          A[g + i % 2 * 8][i / 2 * kBlock + x * kPer + e] = Element{}(lanes[l]->a[i], e);
      for (int i = 0; i < kA / 2; ++i)
        for (int e = 0; e < kPer; ++e)
          B[i * kBlock + x * kPer + e][g] = Element{}(lanes[l]->b[i], e);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
        float sum = (*lanes[l]->d)[i];
        for (int k = 0; k < kDepth; ++k) sum += A[row][k] * B[k][column];
        (*lanes[l]->d)[i] = sum;
      }
  });
}
template <class E>
struct PairElement {
  float operator()(uint32_t word, int e) const {
    const float2 x = unpack<E>(word);
    return e == 0 ? x.x : x.y;
  }
};
struct Tf32Element {
  float operator()(uint32_t word, int) const { return __uint_as_float(word & 0xffffe000u); }
};

template <class E>
inline void mma_pairs(float (&d)[4], uint32_t k_lo, uint32_t q_lo, uint32_t k_hi, uint32_t q_hi,
                      uint32_t b_lo, uint32_t b_hi) {
  multiply_warp<4, true>(d, {k_lo, q_lo, k_hi, q_hi}, {b_lo, b_hi}, PairElement<E>{});
}
template <class E>
inline void mma_half(float (&d)[4], uint32_t upper, uint32_t lower, uint32_t b) {
  multiply_warp<2, true>(d, {upper, lower}, {b}, PairElement<E>{});
}
inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  multiply_warp<4, false>(
      c, {__float_as_uint(a0), __float_as_uint(a1), __float_as_uint(a2), __float_as_uint(a3)},
      {__float_as_uint(b0), __float_as_uint(b1)}, Tf32Element{});
}
inline uint32_t transpose_pairs(uint32_t x) {
  struct Own {
    uint32_t x, r;
  } own{x, 0};
  emulator::together(~0u, own, [](Own** lanes, uint32_t) {
    const auto at = [&](int row, int column) {
      return uint16_t(lanes[4 * row + column / 2]->x >> (16 * (column % 2)));
    };
    for (int l = 0; l < 32; ++l)
      lanes[l]->r = pair_of(at(2 * (l % 4), l / 4), at(2 * (l % 4) + 1, l / 4));
  });
  return own.r;
}

}  // namespace deltic::gpu
