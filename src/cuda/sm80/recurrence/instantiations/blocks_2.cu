// The recurrence for K up to 64.
#include "cuda/sm80/recurrence/launch_kernel.cuh"

namespace deltic::gpu::recurrence {

template void launch<2, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<2, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<2, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<2, true, true>(const Params&, unsigned, cudaStream_t);
template void launch_record<2, false>(const Params&, unsigned, cudaStream_t);
template void launch_record<2, true>(const Params&, unsigned, cudaStream_t);
template void launch_commit<2, false>(const Params&, unsigned, cudaStream_t);
template void launch_commit<2, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::recurrence
