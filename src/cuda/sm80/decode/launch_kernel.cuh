// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/decode/kernel.cuh"

namespace deltic::gpu::decode {

template <class E, int kWidth, bool kVFirst, bool kPerChannel, bool kTrees>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  using Tr = Traits<E, kWidth, kVFirst, kPerChannel, kTrees>;
  decode_kernel<Tr><<<num_ctas, Tr::kThreads, sizeof(Stage<Tr>), stream>>>(p);
  check_launch("decode kernel");
}

}  // namespace deltic::gpu::decode
