// Decode from fp32 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_DECODE(float, 64, true);
DELTIC_INSTANTIATE_HELD(float, 64);
DELTIC_INSTANTIATE_KIND(float, 64, true, Kind::quick);
}  // namespace deltic::gpu::decode
