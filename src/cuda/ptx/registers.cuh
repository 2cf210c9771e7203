// Values that are read or computed again instead of kept in registers, and what else the compiler
// is told without an instruction.
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
__device__ inline int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
// The same in place: x has been computed here, and what follows starts from it.
template <class X>
__device__ inline void keep_here(X*& x) {
  asm volatile("" : "+l"(x));
}
__device__ inline void keep_here(float& x, float& y) { asm volatile("" : "+f"(x), "+f"(y)); }
// x is loaded here, though nobody wants it.
__device__ inline void touch(uint32_t x) { asm volatile("" ::"r"(x)); }
// The compiler moves no access to memory past it; the GPU may.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

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
