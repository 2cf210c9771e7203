// Launches one after the other on a stream that overlap.
#pragma once

namespace deltic::gpu {

// Before Hopper launches do not overlap: there is nothing to say or to wait for. launch_after asks
// for an overlap only where the code that runs waits.
// The next launch of the stream may start; it waits itself for what it reads.
__device__ inline void grid_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The launch before is complete, and what it wrote is visible.
__device__ inline void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace deltic::gpu
