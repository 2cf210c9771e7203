// The general backward for keys of up to 256 channels, with decays of value columns.
#include "cuda/sm80/backward/instantiate.cuh"

namespace deltic::gpu::backward {
DELTIC_INSTANTIATE_BACKWARD(256, 32, true);
DELTIC_INSTANTIATE_BACKWARD(256, 16, true);  // GPUs with less shared memory
}  // namespace deltic::gpu::backward
