// Scores of f16 rows, gates per channel.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__half, true);

}  // namespace deltic::gpu::scores
