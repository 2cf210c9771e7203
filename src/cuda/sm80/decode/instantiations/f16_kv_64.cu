// Decode from fp16 states, K-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_ROUNDED(__half, 64, false);
DELTIC_INSTANTIATE_MANY(__half, 64, false);
DELTIC_INSTANTIATE_MANY(__half, 64, true);
}  // namespace deltic::gpu::decode
