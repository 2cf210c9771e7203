// Definition of launch(); included by instantiations/*.cu alone.
#pragma once

#include <algorithm>

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
  unsigned row_ctas = 0;  // of a split forward the transfer has made them
  if (kGate == GateKind::kHead && (kTransfer || params.segment_chunks == 0)) {
    const int64_t items = (int64_t(params.num_batches) * params.num_tokens + 31) / 32 *
                          ((params.num_value_heads + kRowHeads - 1) / kRowHeads);
    const int64_t per_cta = kPlanThreads / 32;
    row_ctas = unsigned(std::min<int64_t>((items + per_cta - 1) / per_cta, num_sms));
  }
  check_cuda(launch_after(make_plan<kPlanThreads>, dim3(1 + row_ctas), kPlanThreads, 0, stream,
                          params, costs_of(kGate), num_sms),
             "forward: plan");
  const cudaError_t error =
      launch_after<Ctas::kTogether>(kernel, dim3(unsigned(num_sms)), kThreads, kSmemBytes, stream,
                                    maps.q, maps.k, maps.v, maps.g, maps.o, params);
  if (error == cudaErrorCooperativeLaunchTooLarge) refuse_grid(num_sms);
  check_cuda(error, "forward");
}

}  // namespace deltic::gpu::forward
