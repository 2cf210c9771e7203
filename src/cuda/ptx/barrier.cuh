// Barriers of a CTA: mbarriers, named ones, and fences to the copies that go by themselves.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared.cuh"

namespace deltic::gpu {

__device__ inline void barrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(b)), "r"(arrivals));
}
__device__ inline void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(b)) : "memory");
}
__device__ inline void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(b)),
               "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra "
      "DONE;\n"
      "bra WAIT;\nDONE:\n}" ::"r"(smem_u32(b)),
      "r"(parity)
      : "memory");
}
// Whether that phase is over, without waiting for it.
__device__ inline bool barrier_test(uint64_t* b, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n.reg .pred P;\nmbarrier.test_wait.parity.shared::cta.b64 P, [%1], %2;\n"
      "selp.u32 %0, 1, 0, P;\n}"
      : "=r"(is_over)
      : "r"(smem_u32(b)), "r"(parity)
      : "memory");
  return is_over != 0;
}
// Whole warps. Lanes that come one after the other would count as several warps.
__device__ inline void named_sync(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Barrier 1, of warps whose lanes are together already: without __syncwarp.
template <int kThreads>
__device__ inline void named_sync_1_converged() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Global memory alone: the fence of all memory is one of the GPU's, a trip to L2.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Barriers that are made are seen by the copies that complete them.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;");
}

}  // namespace deltic::gpu
