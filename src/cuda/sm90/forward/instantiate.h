// One launch of the kernel and of its planning kernel; instantiations/*.cu have the code.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/forward/params.h"

namespace deltic::gpu::forward {

// kWideGate: gates per channel come by ordinary loads (fp32, fp16, or rows that a tensor map does
// not take) instead of bf16 tiles.
struct Maps {
  CUtensorMap q, k, v, g, o;  // g: per channel, else any
};
template <class E, GateKind kGate, GateForm kForm, bool kWideGate, bool kTransfer>
void launch(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream);

// A launch that may start before the one ahead of it on the stream ends: the kernel calls grid_wait
// before it touches memory.
template <class... Parameters, class... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), dim3 grid, int threads, int smem,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(smem);
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace deltic::gpu::forward
