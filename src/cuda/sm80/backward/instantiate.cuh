// The launch of one instance.
#pragma once

#include "cuda/device.h"
#include "cuda/sm80/backward/instantiate.h"
#include "cuda/sm80/backward/kernel.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::backward {

template <int kWidth, int kColumns, bool kHasGv>
void launch_starts(const Params& p, unsigned ctas, cudaStream_t stream) {
  using Tr = Traits<kWidth, kColumns, kHasGv>;
  constexpr int kBytes = sizeof(Shared<Tr>);
  check_cuda(
      cudaFuncSetAttribute(starts_kernel<Tr>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "shared memory of the backward's states");
  check_cuda(launch(starts_kernel<Tr>, ctas, kThreads, kBytes, stream, p),
             "kernel of the backward's states");
}

template <int kWidth, int kColumns, bool kHasGv>
void launch_segment(const Params& p, int64_t m, unsigned ctas, cudaStream_t stream) {
  using Tr = Traits<kWidth, kColumns, kHasGv>;
  constexpr int kBytes = sizeof(Shared<Tr>);
  check_cuda(
      cudaFuncSetAttribute(segment_kernel<Tr>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "shared memory of the backward");
  check_cuda(launch(segment_kernel<Tr>, ctas, kThreads, kBytes, stream, p, m),
             "kernel of the backward");
}

#define DELTIC_INSTANTIATE_BACKWARD(kWidth, kColumns, kHasGv)                                   \
  template void launch_starts<kWidth, kColumns, kHasGv>(const Params&, unsigned, cudaStream_t); \
  template void launch_segment<kWidth, kColumns, kHasGv>(const Params&, int64_t, unsigned,      \
                                                         cudaStream_t)

}  // namespace deltic::gpu::backward
