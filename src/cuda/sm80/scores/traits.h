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
  // Operands with decays are bf16, never fp16: a decay may be as small as fp32 has numbers.
  using Operand = std::conditional_t<kPerChannel, __nv_bfloat16, E>;
  using Fragment = std::conditional_t<kIsFloat, FloatFragment, HalfFragment>;
  static constexpr int kCtasPerSm = kIsFloat ? 2 : 3;
};

}  // namespace deltic::gpu::scores
