// Launches one after the other on a stream.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace deltic::gpu {

// A launch without its kernel. The same for every kernel, so that the code is there once.
struct Launch {
  dim3 grid;
  unsigned threads, smem;
  cudaStream_t stream;
  bool is_early, is_together;
};
// By the driver's own function, which takes 0.4 us less of a Xeon than the runtime's (H200: 2.8 us
// instead of 3.2): a kernel's handle in the current context is kept. Where there is none, and of a
// launch that fails, by the runtime's, whose errors are the ones to report.
cudaError_t launch_kernel(const Launch& launch, const void* kernel, void** arguments);

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
  static_assert((std::is_same_v<Parameters, Arguments> && ...), "read where they lie, as they are");
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const Launch launch = {grid,   unsigned(threads),   unsigned(smem),
                         stream, overlaps_launches(), kCtas == Ctas::kTogether};
  return launch_kernel(launch, reinterpret_cast<const void*>(kernel), pointers);
}

}  // namespace deltic::gpu
