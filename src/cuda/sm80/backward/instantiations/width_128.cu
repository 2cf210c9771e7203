// The general backward for keys of up to 128 channels.
#include "cuda/sm80/backward/instantiate.cuh"

namespace deltic::gpu::backward {
DELTIC_INSTANTIATE_BACKWARD(128, 64, false);
DELTIC_INSTANTIATE_BACKWARD(128, 16, false);  // GPUs with less shared memory
}  // namespace deltic::gpu::backward
