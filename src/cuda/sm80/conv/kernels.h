// The kernels by name: the door chooses, instantiations/ has them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm80/conv/params.h"

namespace deltic::gpu::conv {

enum class Kernel { forward, step, single, drafts, checkpoints, backward };

// kTaps: 4, of just so many weights, or 8, of any number. kWide: rows move by 16 or 8 bytes.
template <class E, int kTaps, bool kWide>
void launch(Kernel kernel, const Params& p, unsigned ctas, int threads, cudaStream_t stream);

}  // namespace deltic::gpu::conv
