// Scores of bf16 rows, gates per head or none, K = 64.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__nv_bfloat16, 64, false);

}  // namespace deltic::gpu::scores
