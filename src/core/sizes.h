// Products and sums of sizes: the one place that multiplies them, and refuses what does not fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>

namespace deltic {

// Elements that a view may have and may span, and numbers of all states N*HV*K*V. Offsets in bytes
// (8 per element) stay below 2^59, so that a few of them added up are still far from 2^63.
inline constexpr int kMaxExtentLog2 = 56;
inline constexpr int64_t kMaxExtent = int64_t{1} << kMaxExtentLog2;

// A size of 63 bits was not enough. Whoever knows the call turns it into a sentence.
class SizeOverflow : public std::exception {
 public:
  const char* what() const noexcept override { return "a size of 2^63 or more"; }
};

// Factors of at least 0. Nothing of anything is nothing, whatever the other factors.
template <class... Factors>
int64_t checked_product(Factors... factors) {
  if (((factors == 0) || ...)) return 0;
  int64_t result = 1;
  if ((__builtin_mul_overflow(result, factors, &result) || ...)) throw SizeOverflow();
  return result;
}

template <class... Terms>
int64_t checked_sum(Terms... terms) {
  int64_t result = 0;
  if ((__builtin_add_overflow(result, terms, &result) || ...)) throw SizeOverflow();
  return result;
}

// The next multiple, of a size of at least 0.
inline int64_t round_up(int64_t size, int64_t multiple) {
  return checked_sum(size, multiple - 1) / multiple * multiple;
}

// Bytes [a, a + a_bytes) and [b, b + b_bytes), whose ends may lie behind all addresses.
inline bool ranges_overlap(uintptr_t a, uint64_t a_bytes, uintptr_t b, uint64_t b_bytes) {
  return a <= b ? b - a < a_bytes && b_bytes > 0 : a - b < b_bytes && a_bytes > 0;
}

}  // namespace deltic
