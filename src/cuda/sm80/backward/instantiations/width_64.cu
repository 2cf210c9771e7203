// The general backward for keys of up to 64 channels.
#include "cuda/sm80/backward/instantiate.cuh"

namespace deltic::gpu::backward {
DELTIC_INSTANTIATE_BACKWARD(64, 64);
}  // namespace deltic::gpu::backward
