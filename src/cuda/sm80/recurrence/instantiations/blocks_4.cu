// The recurrence for K up to 128.
#include "cuda/sm80/recurrence/launch_kernel.cuh"

namespace deltic::gpu::recurrence {

template void launch<4, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<4, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<4, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<4, true, true>(const Params&, unsigned, cudaStream_t);
template void launch_record<4, false>(const Params&, unsigned, cudaStream_t);
template void launch_record<4, true>(const Params&, unsigned, cudaStream_t);
template void launch_commit<4, false>(const Params&, unsigned, cudaStream_t);
template void launch_commit<4, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::recurrence
