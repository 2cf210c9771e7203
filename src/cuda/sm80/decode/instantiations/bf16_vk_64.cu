// Decode from bf16 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_V_FIRST(__nv_bfloat16, 64);
DELTIC_INSTANTIATE_KIND(__nv_bfloat16, 64, true, Kind::seeded);
}  // namespace deltic::gpu::decode
