// Scores of f32 rows, gates per channel.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(float, true);

}  // namespace deltic::gpu::scores
