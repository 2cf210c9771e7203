// The recurrence for K up to 32.
#include "cuda/sm80/recurrence/launch_kernel.cuh"

namespace deltic::gpu::recurrence {

template void launch<1, false, false>(const Params&, unsigned, cudaStream_t);
template void launch<1, false, true>(const Params&, unsigned, cudaStream_t);
template void launch<1, true, false>(const Params&, unsigned, cudaStream_t);
template void launch<1, true, true>(const Params&, unsigned, cudaStream_t);
template void launch_record<1, false>(const Params&, unsigned, cudaStream_t);
template void launch_record<1, true>(const Params&, unsigned, cudaStream_t);
template void launch_commit<1, false>(const Params&, unsigned, cudaStream_t);
template void launch_commit<1, true>(const Params&, unsigned, cudaStream_t);

}  // namespace deltic::gpu::recurrence
