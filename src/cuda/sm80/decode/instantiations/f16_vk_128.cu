// Decode from fp16 states, V-first, K = 128.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_V_FIRST(__half, 128);
DELTIC_INSTANTIATE_KIND(__half, 128, true, Kind::pairs);
DELTIC_INSTANTIATE_KIND(__half, 128, true, Kind::seeded);
}  // namespace deltic::gpu::decode
