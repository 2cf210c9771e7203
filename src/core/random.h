// Stochastic rounding of 16-bit states: random numbers that are a function of where they are used,
// and the rounding itself. Integers alone, so that every backend has the same.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace deltic {

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011): 128 bits for a counter and a key.
struct Random128 {
  uint32_t word[4];
  // Bits 16 i to 16 i + 15.
  constexpr uint32_t half(int i) const { return word[i / 2] >> (16 * (i % 2)) & 0xFFFFu; }
};
inline constexpr int kPhiloxRounds = 10;
constexpr void philox_round(Random128& counter, uint32_t& key0, uint32_t& key1) {
  auto& x = counter.word;
  const uint64_t a = uint64_t{0xD2511F53u} * x[0], b = uint64_t{0xCD9E8D57u} * x[2];
  const uint32_t x1 = x[1], x3 = x[3];
  x[0] = static_cast<uint32_t>(b >> 32) ^ x1 ^ key0, x[1] = static_cast<uint32_t>(b);
  x[2] = static_cast<uint32_t>(a >> 32) ^ x3 ^ key1, x[3] = static_cast<uint32_t>(a);
  key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
}
constexpr Random128 philox(Random128 counter, uint32_t key0, uint32_t key1) {
  for (int i = 0; i < kPhiloxRounds; ++i) philox_round(counter, key0, key1);
  return counter;
}

// Eight neighbours of a state share a draw: elements 8 `group` to 8 `group` + 7 of a value head, as
// the state layout numbers them, after the token at `position` of its sequence.
constexpr Random128 counter_of(int64_t position, uint32_t head, uint32_t group) {
  const auto at = static_cast<uint64_t>(position);
  return {{group, head, static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32)}};
}
constexpr Random128 draw_group(uint64_t seed, int64_t position, uint32_t head, uint32_t group) {
  return philox(counter_of(position, head, group), static_cast<uint32_t>(seed),
                static_cast<uint32_t>(seed >> 32));
}

// One of the two neighbours of x, the farther from 0 if the fraction of the step between them that
// x is beyond the other, plus random / 2^16, reaches 1: of all 2^16 numbers `random` in that
// fraction. Where the neighbour is no finite number, to nearest.
constexpr uint16_t stochastic_bf16(float x, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t nearest = bits + 0x7FFFu + (bits >> 16 & 1u);
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN
  return static_cast<uint16_t>((magnitude >= 0x7F7F0000u ? nearest : bits + random) >> 16);
}
constexpr uint16_t stochastic_f16(float x, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7FFFFFFFu;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FE000u) {  // 65504, the largest
    return static_cast<uint16_t>(sign | (magnitude >= 0x477FF000u ? 0x7C00u : 0x7BFFu));
  }
  const uint32_t exponent = magnitude >> 23, digits = (magnitude & 0x7FFFFFu) | 0x800000u;
  if (exponent >= 113) {
    const uint32_t rounded = ((magnitude - 0x38000000u) << 3) + random;
    return static_cast<uint16_t>(sign | rounded >> 16);
  }
  // Subnormal: steps of 2^-24, of which x has digits / 2^(126 - exponent).
  if (exponent < 86) return sign;  // below 2^-17 of a step
  const uint64_t rounded = (uint64_t{digits} << 16 >> (126 - exponent)) + random;
  return static_cast<uint16_t>(sign | static_cast<uint16_t>(rounded >> 16));
}

}  // namespace deltic
