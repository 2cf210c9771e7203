// Kernels of the progress test: one that holds SMs, one that compares bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace deltic::test {

// Which SMs a kernel holds: bit i % 64 of word i / 64 is SM i.
struct SmSet {
  static constexpr int kWords = 4, kMost = 64 * kWords;
  uint64_t words[kWords]{};
};

// One CTA per SM that takes it whole (all of its shared memory). Those on SMs of the set stay for
// `nanoseconds`, the others leave at once. Who stays on SM i writes 1 to started[i], in memory of
// the host, if that is not null.
cudaError_t hold_sms(const SmSet& set, int num_sms, int64_t nanoseconds, int* started,
                     cudaStream_t stream);

// Adds the number of 32-bit words in which a and b differ to `count`. bytes: a multiple of 4.
cudaError_t count_differences(const void* a, const void* b, size_t bytes, unsigned long long* count,
                              cudaStream_t stream);

}  // namespace deltic::test
