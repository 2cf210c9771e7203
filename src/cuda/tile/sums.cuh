// Sums over tokens that CTAs left part by part.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Number `index` of all parts, in order and in fp64: the same bits in every run. Parts lie `step`
// numbers apart; 16 of them are under way at once, since each batch takes the latency of L2.
__device__ inline double sum_of_parts(const float* sums, unsigned num_parts, int64_t step,
                                      int64_t index) {
  constexpr unsigned kTogether = 16;
  double sum = 0;
#pragma unroll 1
  for (unsigned first = 0; first < num_parts; first += kTogether) {
    float x[kTogether];
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      x[i] = first + i < num_parts ? sums[(first + i) * step + index] : 0.0f;
    }
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) sum += static_cast<double>(x[i]);
  }
  return sum;
}

}  // namespace deltic::gpu
