// The gated norm of f32 rows.
#include "cuda/sm80/norm/launch_kernel.cuh"

namespace deltic::gpu::norm {

template void launch<float, 8, 1>(const Params&, bool, cudaStream_t);
template void launch<float, 16, 1>(const Params&, bool, cudaStream_t);
template void launch<float, 32, 1>(const Params&, bool, cudaStream_t);
template void launch<float, 32, 2>(const Params&, bool, cudaStream_t);
template void launch<float, 32, 4>(const Params&, bool, cudaStream_t);

}  // namespace deltic::gpu::norm
