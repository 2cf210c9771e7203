// Decode from fp32 states, K-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_DECODE(float, 64, false);
}  // namespace deltic::gpu::decode
