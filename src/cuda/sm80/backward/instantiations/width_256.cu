// The general backward for keys of up to 256 channels.
#include "cuda/sm80/backward/instantiate.cuh"

namespace deltic::gpu::backward {
DELTIC_INSTANTIATE_BACKWARD(256, 32);
DELTIC_INSTANTIATE_BACKWARD(256, 16);  // GPUs with less shared memory
}  // namespace deltic::gpu::backward
