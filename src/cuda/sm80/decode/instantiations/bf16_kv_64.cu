// Decode from bf16 states, K-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_DECODE(__nv_bfloat16, 64, false);
DELTIC_INSTANTIATE_KIND(__nv_bfloat16, 64, false, Kind::seeded);
DELTIC_INSTANTIATE_KIND(__nv_bfloat16, 64, false, Kind::many);
}  // namespace deltic::gpu::decode
