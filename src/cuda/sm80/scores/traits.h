// Compile-time choices of the kernel of scores.
#pragma once

#include "cuda/ptx/fragments.cuh"
#include "cuda/tile/element.cuh"

namespace deltic::gpu::scores {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kPitch = 68;  // of a result in shared memory, floats: see invert.cuh

// A row's bytes in shared memory. Two-byte rows are read 8 bytes per lane by four rows at a time,
// four-byte rows 16 bytes by two: offsets of 32 or 64 bytes between rows use every bank once.
constexpr int row_bytes(int width, int element) {
  const int bytes = width * element, offset = element == 2 ? 32 : 64;
  return bytes + (offset - bytes % 128 + 128) % 128;
}

// E: what q and k are in shared memory, fp32 wherever they are not of one type.
// kPerChannel: decays belong to the operands; else to the result.
// kWidth: K, where it is known: then all rows are 16-byte vectors of E (g: of fp32), addresses are
// constants, and half of the instructions are saved. 0: any K, any rows.
template <class E_, int kWidth_, bool kPerChannel_, bool kHasQ_, bool kHasK_>
struct Traits {
  using E = E_;
  static constexpr int kWidth = kWidth_;
  static_assert(kWidth % 32 == 0, "both halves of the channels are whole steps of 16");
  static constexpr bool kPerChannel = kPerChannel_, kHasQ = kHasQ_, kHasK = kHasK_;
  static_assert(kHasQ || kHasK, "nothing to compute");
  static constexpr bool kIsFloat = sizeof(E) == 4;
  // Operands with decays are never fp16: a decay may be as small as fp32 has numbers. tf32 keeps
  // the precision that fp16 rows came with.
  static constexpr bool kIsTf32 = kPerChannel && __is_same(E, __half);
  using RawFragment = std::conditional_t<kIsFloat, FloatFragment, HalfFragment>;
  using Fragment = std::conditional_t<kIsTf32, FloatFragment, RawFragment>;
  // Per channel one more would spill; else the most that shared memory holds at K = 128.
  static constexpr int kCtasPerSm = kIsFloat ? 2 : kPerChannel ? 3 : kHasQ && kHasK ? 4 : 6;
  static constexpr int kCtasElsewhere = kCtasPerSm == 4 ? 3 : kCtasPerSm;
};

}  // namespace deltic::gpu::scores
