// Launches one after the other on a stream that overlap.
#pragma once

namespace deltic::gpu {

// The next launch of the stream may start; it waits itself for what it reads.
__device__ inline void grid_release() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// The launch before is complete, and what it wrote is visible.
__device__ inline void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace deltic::gpu
