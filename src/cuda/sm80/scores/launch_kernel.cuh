// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/scores/kernel.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::scores {

template <class E, int kWidth, bool kPerChannel, bool kHasQ, bool kHasK>
void launch(const Params& p, unsigned ctas, cudaStream_t stream) {
  const auto kernel = scores_kernel<Traits<E, kWidth, kPerChannel, kHasQ, kHasK>>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.smem_bytes),
      "shared memory of the kernel of scores");
  check_cuda(gpu::launch(kernel, ctas, kThreads, p.smem_bytes, stream, p), "kernel of scores");
}

#define DELTIC_INSTANTIATE_SCORES(E, kWidth, kPerChannel)                            \
  template void launch<E, kWidth, kPerChannel, false, true>(const Params&, unsigned, \
                                                            cudaStream_t);           \
  template void launch<E, kWidth, kPerChannel, true, false>(const Params&, unsigned, \
                                                            cudaStream_t);           \
  template void launch<E, kWidth, kPerChannel, true, true>(const Params&, unsigned, cudaStream_t)

}  // namespace deltic::gpu::scores
