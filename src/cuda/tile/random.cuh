// Rounding by chance on the device: which numbers are drawn for a token, and 16-bit states packed.
#pragma once

#include "core/random.h"
#include "cuda/tile/slots.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu {

// Of a call.
struct Chance {
  uint64_t seed;
  Indices positions;  // [N], of first tokens; absent: 0
};
inline Chance chance_of(const Problem& p) { return {p.seed, p.positions}; }

// The position in its sequence of token t of the call; a tree's tokens follow their parents, of
// which one that is not before its child ends the walk.
template <class Int>
__device__ int64_t position_of(const Chance& x, const SlotLists& slots, int64_t n, Int t) {
  const int64_t first = x.positions.present ? load_index(x.positions, n) : 0;
  if (!slots.parents.present) return first + t;
  int64_t position = first;
  for (Int parent; (parent = parent_of(slots, n, t)) >= 0 && parent < t; t = parent) ++position;
  return position;
}

// draw_group with its rounds in a loop: for code that draws at many places, and seldom.
__device__ inline Random128 draw_slowly(uint64_t seed, int64_t position, uint32_t head,
                                        uint32_t group) {
  Random128 x = counter_of(position, head, group);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll 1
  for (int i = 0; i < kPhiloxRounds; ++i) philox_round(x, key0, key1);
  return x;
}

template <class E>
__device__ uint32_t round_by_chance(float x, uint32_t random) {
  static_assert(sizeof(E) == 2);
  return __is_same(E, __half) ? stochastic_f16(x, random) : stochastic_bf16(x, random);
}
// Eight neighbours that share a draw.
template <class E>
__device__ uint4 pack_by_chance(const float (&x)[Vector<E>::N], const Random128& draw) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = round_by_chance<E>(x[2 * i], draw.half(2 * i)) |
           round_by_chance<E>(x[2 * i + 1], draw.half(2 * i + 1)) << 16;
  }
  return {w[0], w[1], w[2], w[3]};
}

}  // namespace deltic::gpu
