// Launches one after the other on a stream.
#pragma once

#include <cuda_runtime.h>

namespace deltic::gpu {

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

}  // namespace deltic::gpu
