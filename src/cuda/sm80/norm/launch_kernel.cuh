// The launch of one instantiation.
#pragma once

#include "cuda/device.h"
#include "cuda/sm80/norm/kernel.cuh"
#include "cuda/sm80/norm/kernels.h"

namespace deltic::gpu::norm {

template <class E, int kLanes, int kRuns>
void launch(const Params& p, bool is_gradient, cudaStream_t stream) {
  using Tr = Traits<E, kLanes, kRuns>;
  if (is_gradient) {
    backward_kernel<Tr><<<p.num_parts, kThreads, 0, stream>>>(p);
  } else {
    forward_kernel<Tr><<<p.num_parts, kThreads, 0, stream>>>(p);
  }
  check_launch("gated norm kernel");
}

}  // namespace deltic::gpu::norm
