// The second pass of a gradient's sums. In one source file alone: it is no template.
#pragma once

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/conv/params.h"
#include "cuda/tile/sums.cuh"

namespace deltic::gpu::conv {

// The parts' sums in order, in fp64, rounded once. A thread has one weight or bias. Starts before
// the gradient ends.
inline constexpr int kSumThreads = 128;
__global__ void __launch_bounds__(kSumThreads) sums_kernel(const __grid_constant__ Params p) {
  grid_wait();
  if (is_wrong(p.tokens)) return;
  const int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  const int64_t step = int64_t{p.channels} * (p.taps + 1);
  if (index >= step) return;
  const int64_t j = index / p.channels, channel = index - j * p.channels;
  const bool is_bias = j == p.taps;
  const Numbers& to = is_bias ? p.dbias : p.dweight;
  if (!to.present) return;
  store(to.data, to.dtype, to.at(channel, is_bias ? 0 : j),
        static_cast<float>(sum_of_parts(p.sums, p.num_parts, step, index)));
}

}  // namespace deltic::gpu::conv
