// Definition of launch(); included by instantiations/*.cu alone.
#pragma once

#include "cuda/device.h"
#include "cuda/sm90/forward/instantiate.h"
#include "cuda/sm90/forward/kernel.cuh"

namespace deltic::gpu::forward {

template <class E, GateKind kGate, deltic_gate_form kForm, bool kWideGate, bool kTransfer>
void launch(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream) {
  const auto kernel = delta_forward<E, kGate, kForm, kWideGate, kTransfer>;
  static SharedMemory memory;
  memory.allow(reinterpret_cast<const void*>(kernel), kSmemBytes, "forward: shared memory");
  launch_plan(params, kGate, false, num_sms, stream);
  const auto start = [&]<Ctas kCtas>() {
    return launch_after<kCtas>(kernel, dim3(unsigned(num_sms)), kThreads, kSmemBytes, stream,
                               maps.q, maps.k, maps.v, maps.g, maps.o, params);
  };
  const cudaError_t error = schedule::may_start_apart(num_sms)
                                ? start.template operator()<Ctas::kAlone>()
                                : start.template operator()<Ctas::kTogether>();
  if (error == cudaErrorCooperativeLaunchTooLarge) refuse_grid(num_sms);
  check_cuda(error, "forward");
}

}  // namespace deltic::gpu::forward
