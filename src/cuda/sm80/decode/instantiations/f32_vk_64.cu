// Decode from fp32 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_V_FIRST(float, 64);
}  // namespace deltic::gpu::decode
