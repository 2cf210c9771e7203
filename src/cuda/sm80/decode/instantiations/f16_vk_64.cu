// Decode from fp16 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_kernel.cuh"

namespace deltic::gpu::decode {

template void launch<__half, 64, true, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 64, true, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 64, true, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<__half, 64, true, true, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::decode
