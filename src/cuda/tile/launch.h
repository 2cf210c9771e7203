// Launches one after the other on a stream.
#pragma once

#include <cuda_runtime.h>

namespace deltic::gpu {

// Whether the code that runs on the current device waits in grid_wait: that of Hopper and later.
bool overlaps_launches();

// A launch that may start before the one ahead of it on the stream ends: the kernel calls grid_wait
// before it touches memory. Together: CTAs of the grid wait for one another, so that all of them
// run at once, whatever else is on the GPU; a grid for which the stream's context is too small
// fails with cudaErrorCooperativeLaunchTooLarge.
enum class Ctas { kAlone, kTogether };
template <Ctas kCtas = Ctas::kAlone, class... Parameters, class... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), dim3 grid, int threads, int smem,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = overlaps_launches();
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(smem);
  config.stream = stream, config.attrs = attributes;
  config.numAttrs = kCtas == Ctas::kTogether ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace deltic::gpu
