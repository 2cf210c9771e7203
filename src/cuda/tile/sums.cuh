// Sums over tokens that CTAs left part by part.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Number `index` of all parts, in order and in fp64: the same bits in every run. Parts lie `step`
// numbers apart.
__device__ inline float sum_of_parts(const float* sums, unsigned num_parts, int64_t step,
                                     int64_t index) {
  double sum = 0;
#pragma unroll 8
  for (unsigned part = 0; part < num_parts; ++part) {
    sum += static_cast<double>(sums[part * step + index]);
  }
  return static_cast<float>(sum);
}

}  // namespace deltic::gpu
