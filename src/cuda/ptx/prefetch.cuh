// Lines of memory to L2, ahead of those who read them.
#pragma once

namespace deltic::gpu {

// The line of 128 bytes that holds `src`. Lanes may name different ones at once; those of
// bulk_prefetch are sent one after the other.
__device__ inline void line_prefetch(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(src)));
}
// The address as the compiler has it: generic addresses of global memory are the global ones.
__device__ inline void line_prefetch_as_is(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src));
}

}  // namespace deltic::gpu
