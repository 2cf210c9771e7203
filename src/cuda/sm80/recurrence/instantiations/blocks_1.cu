// The recurrence for K up to 32.
#include "cuda/sm80/recurrence/launch_kernel.cuh"

namespace deltic::gpu::recurrence {

template void launch<1, false>(const Params&, unsigned, cudaStream_t);
template void launch<1, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::recurrence
