// Values that are read again instead of kept in registers.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Shared memory read again instead of a register held.
template <class X>
__device__ inline X reread(const X& x) {
  return *reinterpret_cast<const volatile X*>(&x);
}

// The same value, but what is computed from it is computed here and not kept from before.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The thread's index, read anew: else dozens of addresses that depend on it are kept, and spilled.
__device__ inline int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

// The number of CTAs, likewise.
__device__ inline int grid_size() {
  int n;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
  return n;
}

}  // namespace deltic::gpu
