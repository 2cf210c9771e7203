// Scores of f16 rows, gates per channel, K = 128.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__half, 128, true);

}  // namespace deltic::gpu::scores
