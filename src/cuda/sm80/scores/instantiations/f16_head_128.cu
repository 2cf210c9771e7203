// Scores of f16 rows, gates per head or none, K = 128.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__half, 128, false);

}  // namespace deltic::gpu::scores
