// The gated norm of bf16 rows.
#include "cuda/sm80/norm/launch_kernel.cuh"

namespace deltic::gpu::norm {

template void launch<__nv_bfloat16, 8, 1>(const Params&, bool, cudaStream_t);
template void launch<__nv_bfloat16, 16, 1>(const Params&, bool, cudaStream_t);
template void launch<__nv_bfloat16, 32, 1>(const Params&, bool, cudaStream_t);
template void launch<__nv_bfloat16, 32, 2>(const Params&, bool, cudaStream_t);
template void launch<__nv_bfloat16, 32, 4>(const Params&, bool, cudaStream_t);

}  // namespace deltic::gpu::norm
