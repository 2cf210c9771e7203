// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/recurrence/kernel.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::recurrence {

template <int kBlocks, bool kPerChannel, bool kOneStage>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  const auto kernel = recurrence_kernel<Traits<kBlocks, kPerChannel, kOneStage>>;
  check_cuda(gpu::launch(kernel, num_ctas, kThreads, 0, stream, p), "recurrence kernel");
}

template <int kBlocks, bool kPerChannel>
void launch_record(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  const auto kernel = recurrence_kernel<Traits<kBlocks, kPerChannel, false, true>>;
  check_cuda(gpu::launch(kernel, num_ctas, kThreads, 0, stream, p),
             "recurrence kernel that leaves a record");
}

template <int kBlocks, bool kPerChannel>
void launch_commit(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  const auto kernel = commit_kernel<Traits<kBlocks, kPerChannel, false, true>>;
  check_cuda(gpu::launch(kernel, num_ctas, kThreads, 0, stream, p), "commit kernel");
}

}  // namespace deltic::gpu::recurrence
