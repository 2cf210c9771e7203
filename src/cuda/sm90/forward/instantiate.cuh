// Definition of launch(); included by instantiations/*.cu alone.
#pragma once

#include "cuda/device.h"
#include "cuda/sm90/forward/instantiate.h"
#include "cuda/sm90/forward/kernel.cuh"

namespace deltic::gpu::forward {

template <class E, GateKind kGate, GateForm kForm, bool kWideGate, bool kTransfer>
void launch(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream) {
  constexpr int kPlanThreads = 512;
  const auto kernel = delta_forward<E, kGate, kForm, kWideGate, kTransfer>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
             "forward: shared memory");
  check_cuda(launch_after(make_plan<kPlanThreads>, dim3(1), kPlanThreads, 0, stream, params,
                          costs_of(kGate), num_sms),
             "forward: plan");
  check_cuda(launch_after(kernel, dim3(unsigned(num_sms)), kThreads, kSmemBytes, stream, maps.q,
                          maps.k, maps.v, maps.g, maps.o, params),
             "forward");
}

}  // namespace deltic::gpu::forward
