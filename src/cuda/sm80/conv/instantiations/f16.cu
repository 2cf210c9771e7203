// The convolution of f16 rows.
#include "cuda/sm80/conv/launch_kernel.cuh"

namespace deltic::gpu::conv {

template void launch<__half, 4, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__half, 4, false>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__half, 8, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__half, 8, false>(Kernel, const Params&, unsigned, int, cudaStream_t);

}  // namespace deltic::gpu::conv
