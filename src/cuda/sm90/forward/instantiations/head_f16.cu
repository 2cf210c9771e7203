#include "cuda/sm90/forward/instantiate.cuh"

namespace deltic::gpu::forward {

template void launch<__half, GateKind::kHead, DELTIC_GATE_LOG_DECAY, false, false>(const Params&,
                                                                                   const Maps&, int,
                                                                                   cudaStream_t);
template void launch<__half, GateKind::kHead, DELTIC_GATE_LOG_DECAY, false, true>(const Params&,
                                                                                  const Maps&, int,
                                                                                  cudaStream_t);

}  // namespace deltic::gpu::forward
