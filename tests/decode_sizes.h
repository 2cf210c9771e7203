// Sizes of decode for which a GPU of 132 SMs runs other kernels than for a few heads: a test
// without a GPU sees which kernels they reach, tests on one compare their bits.
#pragma once

#include <cstdint>

namespace deltic::test {

// States with which the size has a kernel that no other size of the list has.
enum class Where { everywhere, v_first, v_first_half, v_first_f32 };

struct ServedDecode {
  const char* name;
  int64_t sequences, tokens, heads;  // value heads; all with K = 128 and V = 8, a slice of columns
  Where where;
  bool is_packed = false;
  bool is_kept = true;  // the states after it

  // Packed: as many tokens as sequences, if these are 44 or 64.
  int64_t length_of(int64_t n) const {
    return !is_packed ? tokens : n % 11 == 3 ? 2 : n % 11 == 5 ? 0 : 1;
  }
};
// 704 heads are more than the 660 CTAs that run at once, of which a CTA has one head; 4096 are two
// waves of the kernel whose CTAs have two parts, and so many that a token of them is no longer for
// warps that work alone.
inline constexpr ServedDecode kServedDecodes[] = {
    {"several tokens", 44, 3, 16, Where::everywhere},
    {"several tokens of many waves", 64, 3, 64, Where::v_first},
    {"packed, mostly a token each", 44, 1, 16, Where::v_first, true},
    {"packed, a token more than sequences", 48, 1, 16, Where::v_first_half, true},
    {"packed, mostly a token each of many", 64, 1, 64, Where::v_first, true},
    {"states that are not kept", 44, 5, 16, Where::v_first_f32, false, false},
};
// One token of those sequences, as all but the packed ones are stepped through.
inline constexpr ServedDecode kServedStep = {"a token", 44, 1, 16, Where::everywhere};
inline constexpr ServedDecode kManyStep = {"a token of many", 64, 1, 64, Where::v_first};
// The same of a few heads.
inline constexpr ServedDecode kFewTokens = {"several tokens of few", 2, 3, 2, Where::everywhere};
inline constexpr ServedDecode kFewStep = {"a token of few", 2, 1, 2, Where::everywhere};

}  // namespace deltic::test
