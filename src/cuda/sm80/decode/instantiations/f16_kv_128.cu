// Decode from fp16 states, K-first, K = 128.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {

template void launch<__half, 128, false, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 128, false, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 128, false, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 128, false, true, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::decode
