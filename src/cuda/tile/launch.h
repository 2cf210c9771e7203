// Launches one after the other on a stream.
#pragma once

#include <cuda_runtime.h>

#include "cuda/tile/start.h"

namespace deltic::gpu {

// Whether the code that runs on the current device waits in grid_wait: that of Hopper and later.
bool overlaps_launches();

// A launch that starts when the one ahead of it on the stream has ended.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int smem,
                   cudaStream_t stream, const Arguments&... arguments) {
  return launch_as({grid, unsigned(threads), unsigned(smem), stream, false, false}, kernel,
                   arguments...);
}

// A launch that may start before the one ahead of it on the stream ends: the kernel calls grid_wait
// before it touches memory. Together: CTAs of the grid wait for one another, so that all of them
// run at once, whatever else is on the GPU; a grid for which the stream's context is too small
// fails with cudaErrorCooperativeLaunchTooLarge.
enum class Ctas { kAlone, kTogether };
template <Ctas kCtas = Ctas::kAlone, class... Parameters, class... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), dim3 grid, int threads, int smem,
                         cudaStream_t stream, const Arguments&... arguments) {
  return launch_as({grid, unsigned(threads), unsigned(smem), stream, overlaps_launches(),
                    kCtas == Ctas::kTogether},
                   kernel, arguments...);
}

}  // namespace deltic::gpu
