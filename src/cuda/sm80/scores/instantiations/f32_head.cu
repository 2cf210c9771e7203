// Scores of f32 rows, gates per head or none.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(float, false);

}  // namespace deltic::gpu::scores
