// The launches of one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/conv/kernel.cuh"
#include "cuda/sm80/conv/kernels.h"
#include "cuda/tile/launch.h"

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
    case Kernel::single:
      if constexpr (kTaps == 4 && kWide) {
        using Tr = Step<E, kTaps, kWide>;
        const auto kernel = p.state_in.order == Order::inputs ? single_kernel<Tr, Order::inputs>
                                                              : single_kernel<Tr, Order::channels>;
        check_cuda(launch_after(kernel, dim3(ctas), threads, 0, stream, p),
                   "launch of the convolution's kernel");
      }
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
