// The general backward for keys of up to 64 channels, with decays of value columns.
#include "cuda/sm80/backward/instantiate.cuh"

namespace deltic::gpu::backward {
DELTIC_INSTANTIATE_BACKWARD(64, 64, true);
DELTIC_INSTANTIATE_BACKWARD(64, 16, true);  // GPUs with less shared memory
}  // namespace deltic::gpu::backward
