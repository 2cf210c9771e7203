// The recurrence for K up to 256.
#include "cuda/sm80/recurrence/launch_kernel.cuh"

namespace deltic::gpu::recurrence {

template void launch<8, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<8, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<8, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<8, true, true>(const Params&, unsigned, cudaStream_t);
template void launch_record<8, false>(const Params&, unsigned, cudaStream_t);
template void launch_record<8, true>(const Params&, unsigned, cudaStream_t);
template void launch_commit<8, false>(const Params&, unsigned, cudaStream_t);
template void launch_commit<8, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::recurrence
