// Decode from fp16 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_V_FIRST(__half, 64);
DELTIC_INSTANTIATE_KIND(__half, 64, true, Kind::seeded);
}  // namespace deltic::gpu::decode
