// Division by a number that is known before the kernel starts.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Of numbers below 2^31 by a number of 1 to 2^31 - 1: a multiplication and a shift, where the
// division itself is 25 instructions that wait for each other. With d <= 2^l < 2 d the factor
// ceil(2^(31 + l) / d) is below 2^32 and too large by less than 1, of the quotient less than
// x / 2^(31 + l) < 1 / d.
struct Divisor {
  uint32_t value = 1, factor = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : value(d) {
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < d) ++log2;
    if (d < 2) return;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + d - 1) / d);
    shift = log2 - 1;
  }
#ifdef __CUDACC__
  __host__ __device__
#endif
      uint32_t
      quotient(uint32_t x) const {
    if (value == 1) return x;
    return static_cast<uint32_t>((uint64_t{x} * factor) >> 32) >> shift;
  }
};

}  // namespace deltic::gpu
