// Instances: bf16, gates per channel, K = 64.
#include "cuda/sm90/backward/instantiate.cuh"

namespace deltic::gpu::gradient {

DELTIC_INSTANTIATE_GRADIENT(__nv_bfloat16, 64, true);

}  // namespace deltic::gpu::gradient
