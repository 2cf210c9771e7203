// Scores of f32 rows, gates per channel, any K.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(float, 0, true);

}  // namespace deltic::gpu::scores
