// The launches of one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/conv/kernel.cuh"
#include "cuda/sm80/conv/kernels.h"

namespace deltic::gpu::conv {

template <class E, int kTaps, bool kWide>
void launch(Kernel kernel, const Params& p, unsigned ctas, int threads, cudaStream_t stream) {
  switch (kernel) {
    case Kernel::forward:
      forward_kernel<Forward<E, kTaps, kWide>><<<ctas, threads, 0, stream>>>(p);
      break;
    case Kernel::step:
      step_kernel<Step<E, kTaps, kWide>><<<ctas, threads, 0, stream>>>(p);
      break;
    case Kernel::checkpoints:
      checkpoint_kernel<Step<E, kTaps, kWide>><<<ctas, threads, 0, stream>>>(p);
      break;
    case Kernel::backward:
      backward_kernel<Backward<E, kTaps, kWide>><<<ctas, threads, 0, stream>>>(p);
      break;
  }
  check_launch("convolution kernel");
}

}  // namespace deltic::gpu::conv
