#include "cuda/sm90/forward/instantiate_fused.cuh"

namespace deltic::gpu::forward {

template void launch_fused<__nv_bfloat16>(const Params&, const Maps&, int, cudaStream_t);

}  // namespace deltic::gpu::forward
