// Copies that go by themselves: of contiguous bytes, and of boxes of tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/policies.cuh"
#include "cuda/ptx/shared.cuh"

namespace deltic::gpu {

__device__ inline void bulk_load(void* dst, const void* src, int bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_u32(dst)),
      "l"(src), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
}

// Into L2.
__device__ inline void bulk_prefetch(const void* src, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(src)),
               "r"(bytes)
               : "memory");
}

template <uint64_t kPolicy = kEvictLast>
__device__ inline void bulk_store(void* dst, const void* src, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(dst)),
      "r"(smem_u32(src)), "r"(bytes), "l"(kPolicy)
      : "memory");
}
// Everything this thread stored by bulk copies, tensors too, is written; or has only been read.
__device__ inline void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ inline void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void store_packet(void* p, uint32_t v) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(__cvta_generic_to_global(p)),
               "r"(v), "l"(kEvictLast)
               : "memory");
}

// --- bulk tensor copies, maps of (channel, head, token, batch) -----------------------------------
template <uint64_t kPolicy = kEvictFirst>
__device__ inline void tensor_load(void* dst, const CUtensorMap* map, int channel, int head,
                                   int token, int batch, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem_u32(dst)),
      "l"(map), "r"(channel), "r"(head), "r"(token), "r"(batch), "r"(smem_u32(bar)), "l"(kPolicy)
      : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, const void* src, int channel, int head,
                                    int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3, %4}], [%5], %6;\ncp.async.bulk.commit_group;" ::"l"(map),
      "r"(channel), "r"(head), "r"(token), "r"(batch), "r"(smem_u32(src)), "l"(kEvictFirst)
      : "memory");
}

}  // namespace deltic::gpu
