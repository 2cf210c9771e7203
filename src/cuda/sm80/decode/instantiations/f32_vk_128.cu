// Decode from fp32 states, V-first, K = 128.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_DECODE(float, 128, true);
DELTIC_INSTANTIATE_HELD(float, 128);
DELTIC_INSTANTIATE_KIND(float, 128, true, Kind::quick);
}  // namespace deltic::gpu::decode
