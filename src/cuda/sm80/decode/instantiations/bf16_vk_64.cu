// Decode from bf16 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_ROUNDED(__nv_bfloat16, 64, true);
}  // namespace deltic::gpu::decode
