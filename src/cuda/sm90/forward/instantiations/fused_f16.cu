#include "cuda/sm90/forward/instantiate_fused.cuh"

namespace deltic::gpu::forward {

template void launch_fused<__half>(const Params&, const Maps&, int, cudaStream_t);

}  // namespace deltic::gpu::forward
