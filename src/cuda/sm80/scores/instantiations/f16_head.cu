// Scores of f16 rows, gates per head or none.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__half, false);

}  // namespace deltic::gpu::scores
