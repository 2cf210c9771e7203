#include "cuda/sm90/forward/instantiate.cuh"

namespace deltic::gpu::forward {

template void launch<__nv_bfloat16, GateKind::kChannel, DELTIC_GATE_SOFTPLUS, true, false>(
    const Params&, const Maps&, int, cudaStream_t);
template void launch<__nv_bfloat16, GateKind::kChannel, DELTIC_GATE_SOFTPLUS, true, true>(
    const Params&, const Maps&, int, cudaStream_t);

}  // namespace deltic::gpu::forward
