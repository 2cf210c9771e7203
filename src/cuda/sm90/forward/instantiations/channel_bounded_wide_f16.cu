#include "cuda/sm90/forward/instantiate.cuh"

namespace deltic::gpu::forward {

template void launch<__half, GateKind::kChannel, DELTIC_GATE_BOUNDED, true, false>(const Params&,
                                                                                   const Maps&, int,
                                                                                   cudaStream_t);
template void launch<__half, GateKind::kChannel, DELTIC_GATE_BOUNDED, true, true>(const Params&,
                                                                                  const Maps&, int,
                                                                                  cudaStream_t);

}  // namespace deltic::gpu::forward
