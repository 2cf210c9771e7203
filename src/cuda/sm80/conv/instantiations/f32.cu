// The convolution of f32 rows.
#include "cuda/sm80/conv/launch_kernel.cuh"

namespace deltic::gpu::conv {

template void launch<float, 4, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<float, 4, false>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<float, 8, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<float, 8, false>(Kernel, const Params&, unsigned, int, cudaStream_t);

}  // namespace deltic::gpu::conv
