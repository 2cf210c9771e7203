// Instances: f16, gates per head or none, K = 64.
#include "cuda/sm90/backward/instantiate.cuh"

namespace deltic::gpu::gradient {

DELTIC_INSTANTIATE_GRADIENT(__half, 64, false);

}  // namespace deltic::gpu::gradient
