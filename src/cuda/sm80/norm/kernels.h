// The kernels of whole rows in registers: the door chooses, instantiations/ has them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm80/norm/params.h"

namespace deltic::gpu::norm {

// Rows of up to `kLanes * kRuns` runs of 16 bytes.
template <class E, int kLanes, int kRuns>
void launch(const Params& p, bool is_gradient, cudaStream_t stream);

}  // namespace deltic::gpu::norm
