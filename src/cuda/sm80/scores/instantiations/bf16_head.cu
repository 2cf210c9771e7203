// Scores of bf16 rows, gates per head or none, any K.
#include "cuda/sm80/scores/launch_kernel.cuh"

namespace deltic::gpu::scores {

DELTIC_INSTANTIATE_SCORES(__nv_bfloat16, 0, false);

}  // namespace deltic::gpu::scores
