// Scores of bf16 rows, gates per channel, K = 128.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__nv_bfloat16, 128, true);

}  // namespace deltic::gpu::scores
