// The launches of the general backward's instances.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm80/backward/params.h"

namespace deltic::gpu::backward {

template <int kWidth, int kColumns, bool kHasGv>
void launch_starts(const Params& p, unsigned ctas, cudaStream_t stream);
template <int kWidth, int kColumns, bool kHasGv>
void launch_segment(const Params& p, int64_t m, unsigned ctas, cudaStream_t stream);

}  // namespace deltic::gpu::backward
