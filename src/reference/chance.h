// Stochastic rounding as the header says it, number by number in fp64.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace deltic::reference {

// A number of 0 to 1 in steps of 2^-16: Philox4x32-10 of the seed (key), and of a group of eight
// elements, the value head and the position (counter); an element has 16 of its 128 bits.
inline double chance(uint64_t seed, int64_t position, int64_t head, int64_t element) {
  constexpr uint64_t kLow = 0xFFFFFFFF;
  const auto place = static_cast<uint64_t>(position), group = static_cast<uint64_t>(element) / 8;
  std::array<uint64_t, 4> c = {group & kLow, static_cast<uint64_t>(head) & kLow, place & kLow,
                               place >> 32};
  uint64_t left = seed & kLow, right = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = c[0] * 0xD2511F53, second = c[2] * 0xCD9E8D57;
    c = {(second >> 32) ^ c[1] ^ left, second & kLow, (first >> 32) ^ c[3] ^ right, first & kLow};
    left = (left + 0x9E3779B9) & kLow, right = (right + 0xBB67AE85) & kLow;
  }
  const auto i = static_cast<size_t>(element % 8);
  return static_cast<double>((c[i / 2] >> (i % 2 * 16)) & 0xFFFF) / 65536;
}

// The neighbour of x on the side of 0, or the other one where x is so far beyond it, in steps from
// one to the other, that with `chance` it comes to a whole step. To nearest from the largest
// number on.
inline double rounded_by_chance(DType type, double x, double chance) {
  const bool is_bf16 = type == DType::bf16;
  const double largest = is_bf16 ? 0x1.FEp127 : 65504;
  if (!(std::abs(x) < largest)) return rounded_to(type, x);
  if (x == 0) return x;
  const int exponent = std::max(std::ilogb(x), is_bf16 ? -126 : -14);
  const double step = std::ldexp(1.0, exponent - (is_bf16 ? 7 : 10));
  const double steps = std::floor(std::abs(x) / step + chance);
  return std::copysign(steps * step, x);
}

}  // namespace deltic::reference
