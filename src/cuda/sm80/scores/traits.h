// Compile-time choices of the kernel of scores.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/element.cuh"

namespace deltic::gpu::scores {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kPitch = 68;  // of a result in shared memory, floats: see invert.cuh

// E: what q and k are in shared memory, fp32 wherever they are not of one type.
// kPerChannel: decays belong to the operands; else to the result.
template <class E_, bool kPerChannel_, bool kHasQ_, bool kHasK_>
struct Traits {
  using E = E_;
  static constexpr bool kPerChannel = kPerChannel_, kHasQ = kHasQ_, kHasK = kHasK_;
  static_assert(kHasQ || kHasK, "nothing to compute");
  static constexpr bool kIsFloat = sizeof(E) == 4;
  // Operands with decays are never fp16: a decay may be as small as fp32 has numbers. tf32 keeps
  // the precision that fp16 rows came with.
  static constexpr bool kIsTf32 = kPerChannel && __is_same(E, __half);
  using RawFragment = std::conditional_t<kIsFloat, FloatFragment, HalfFragment>;
  using Fragment = std::conditional_t<kIsTf32, FloatFragment, RawFragment>;
  static constexpr int kCtasPerSm = kIsFloat ? 2 : 3;
};

}  // namespace deltic::gpu::scores
