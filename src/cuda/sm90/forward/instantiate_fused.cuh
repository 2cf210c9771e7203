// Definition of launch_fused(); included by instantiations/fused*.cu alone.
#pragma once

#include "cuda/device.h"
#include "cuda/sm90/forward/fused.cuh"
#include "cuda/sm90/forward/instantiate.h"

namespace deltic::gpu::forward {

template <class E>
void launch_fused(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream) {
  const auto kernel = delta_forward_fused<E>;
  static SharedMemory memory;
  memory.allow(reinterpret_cast<const void*>(kernel), kSmemBytes, "forward: shared memory");
  launch_plan(params, GateKind::kHead, true, num_sms, stream);
  check_cuda(launch_after(kernel, dim3(unsigned(num_sms)), kThreads, int(sizeof(FusedSmem)), stream,
                          maps.q, maps.k, maps.v, maps.o, params),
             "forward");
}

}  // namespace deltic::gpu::forward
