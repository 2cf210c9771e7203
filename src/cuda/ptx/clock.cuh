// The GPU's clock.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// All SMs have the same.
__device__ inline uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace deltic::gpu
