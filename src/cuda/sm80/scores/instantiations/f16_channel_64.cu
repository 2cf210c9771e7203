// Scores of f16 rows, gates per channel, K = 64.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__half, 64, true);

}  // namespace deltic::gpu::scores
