// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/recurrence/kernel.cuh"

namespace deltic::gpu::recurrence {

template <int kBlocks, bool kPerChannel, bool kOneStage>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  recurrence_kernel<Traits<kBlocks, kPerChannel, kOneStage>><<<num_ctas, kThreads, 0, stream>>>(p);
  check_launch("recurrence kernel");
}

template <int kBlocks, bool kPerChannel>
void launch_record(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  recurrence_kernel<Traits<kBlocks, kPerChannel, false, true>>
      <<<num_ctas, kThreads, 0, stream>>>(p);
  check_launch("recurrence kernel that leaves a record");
}

template <int kBlocks, bool kPerChannel>
void launch_commit(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  commit_kernel<Traits<kBlocks, kPerChannel, false, true>><<<num_ctas, kThreads, 0, stream>>>(p);
  check_launch("commit kernel");
}

}  // namespace deltic::gpu::recurrence
