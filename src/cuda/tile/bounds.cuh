// How many CTAs of an SM a kernel's registers leave room for, by the GPU that it is compiled for.
#pragma once

namespace deltic::gpu {

// The second number of __launch_bounds__. Hopper's are measured; other GPUs' code of some kernels
// has a few registers more, which would be spilled.
constexpr int ctas_per_sm([[maybe_unused]] int on_hopper, [[maybe_unused]] int elsewhere) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return elsewhere;
#else
  return on_hopper;
#endif
}

}  // namespace deltic::gpu
