// The convolution of bf16 rows.
#include "cuda/sm80/conv/launch_kernel.cuh"

namespace deltic::gpu::conv {

template void launch<__nv_bfloat16, 4, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__nv_bfloat16, 4, false>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__nv_bfloat16, 8, true>(Kernel, const Params&, unsigned, int, cudaStream_t);
template void launch<__nv_bfloat16, 8, false>(Kernel, const Params&, unsigned, int, cudaStream_t);

}  // namespace deltic::gpu::conv
