// Decode from fp32 states, V-first, K = 128.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_V_FIRST(float, 128);
DELTIC_INSTANTIATE_KIND(float, 128, true, Kind::stream);
}  // namespace deltic::gpu::decode
