// The launch of one instantiation.
#pragma once

#include "cuda/device.h"
#include "cuda/sm80/norm/kernel.cuh"
#include "cuda/sm80/norm/kernels.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::norm {

template <class E, int kLanes, int kRuns>
void launch(const Params& p, bool is_gradient, cudaStream_t stream) {
  using Tr = Traits<E, kLanes, kRuns>;
  const auto kernel = is_gradient ? backward_kernel<Tr> : forward_kernel<Tr>;
  check_cuda(launch_after(kernel, dim3(p.num_parts), kThreads, 0, stream, p),
             "launch of the gated norm's kernel");
}

}  // namespace deltic::gpu::norm
