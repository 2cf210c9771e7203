// Flags in global memory between CTAs of a launch.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Orders nothing by itself: a look that succeeded is followed by fence_acquire.
__device__ inline uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// A number that others may be writing meanwhile, before or after. Without a claim on memory: the
// compiler may move it past other accesses.
__device__ inline int load_unordered(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// After a relaxed load, an acquire: L1 forgets what it has. The load may be long under way, where
// an acquiring load is waited for at once; the older fence is a trip to L2.
__device__ inline void fence_acquire() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}
__device__ inline void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// All threads that a barrier put before this one have written too.
__device__ inline void add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// The value before; orders nothing else.
__device__ inline uint32_t compare_and_swap(uint32_t* p, uint32_t from, uint32_t to) {
  uint32_t v;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(v)
               : "l"(p), "r"(from), "r"(to)
               : "memory");
  return v;
}
// The number before; nobody else gets it. Orders nothing else.
__device__ inline uint32_t draw(uint32_t* p) {
  uint32_t v;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// The value before. What was written before an exchange, by threads that a barrier put before it as
// well, is seen behind the next one.
__device__ inline uint32_t exchange(uint32_t* p, uint32_t to) {
  uint32_t v;
  asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(v)
               : "l"(p), "r"(to)
               : "memory");
  return v;
}
// Whoever sets the flag has started, or will without this CTA's end: all that take part in the
// launch have (schedule/attendance.h).
__device__ inline void wait_flag(const uint32_t* p, uint32_t at_least) {
  while (load_relaxed(p) < at_least) {
  }
  fence_acquire();
}

}  // namespace deltic::gpu
