// The launches of the backward's instances.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/backward/params.h"

namespace deltic::gpu::gradient {

// All kernels of a call, in order. E: of q, k, v and what operands are.
template <class E, int K, bool kPerChannel>
void launch(const Params& p, const Maps& maps, cudaStream_t stream);

}  // namespace deltic::gpu::gradient
