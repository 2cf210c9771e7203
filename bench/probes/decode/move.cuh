// States moved in place and nothing else, by CTAs that live for one piece: which bytes a request
// covers, through what, with which hints, and how many of them are under way.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace probe {

enum class Pattern {
  linear,   // the CTA's piece is one run, a warp's request 512 bytes of it
  halves,   // fp32 V-first as the decode kernel has it: two runs of 256 bytes a request
  warps,    // a run per warp
  rows,     // K-first: kRow bytes of every row of 512, neighbouring rows in one request
  rows_of,  // K-first as the decode kernel has it: a thread has neighbouring rows
};
enum class Via { registers, shared, bulk };
enum class Hint { none, streamed, first };  // first: L2 evicts it first
enum class Order { states, mixed, slices };

struct Move {
  char* from;
  char* to;
  const int* slots;
  int64_t slot_bytes;
  int state_bytes, heads;
};

__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <Hint kHint>
__device__ uint4 load(const void* from) {
  uint4 w;
  if constexpr (kHint == Hint::none) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(from));
  } else if constexpr (kHint == Hint::streamed) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(from));
  } else {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(from), "l"(evict_first()));
  }
  return w;
}
template <Hint kHint>
__device__ void store(void* to, const uint4& w) {
  if constexpr (kHint == Hint::none) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w)
                 : "memory");
  } else if constexpr (kHint == Hint::streamed) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w)
                 : "memory");
  } else {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to), "r"(w.x),
                 "r"(w.y), "r"(w.z), "r"(w.w), "l"(evict_first())
                 : "memory");
  }
}
template <Hint kHint>
__device__ void copy_in(uint4* to, const void* from) {
  const auto s = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kHint == Hint::first) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(s), "l"(from),
                 "l"(evict_first())
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(from) : "memory");
  }
}

template <int kThreads, int kVectors, Pattern kPattern, int kRow>
__device__ int64_t place(int slice, int i) {
  constexpr int kBytes = kThreads * kVectors * 16;
  const int t = threadIdx.x;
  if constexpr (kPattern == Pattern::linear) {
    return int64_t{slice} * kBytes + (i * kThreads + t) * 16;
  } else if constexpr (kPattern == Pattern::warps) {
    return int64_t{slice} * kBytes + t / 32 * (kVectors * 512) + i * 512 + t % 32 * 16;
  } else if constexpr (kPattern == Pattern::halves) {
    return int64_t{slice} * kBytes + (t / 16 * (kVectors / 2) + i / 2) * 512 + i % 2 * 256 +
           t % 16 * 16;
  } else {
    constexpr int kLanes = kRow / 16, kGroups = kThreads / kLanes;
    const int row =
        kPattern == Pattern::rows ? i * kGroups + t / kLanes : t / kLanes * kVectors + i;
    return int64_t{slice} * kRow + row * 512 + t % kLanes * 16;
  }
}

template <int kThreads, int kVectors, Pattern kPattern, int kRow, Via kVia, Hint kLoad, Hint kStore,
          Order kOrder>
__global__ void __launch_bounds__(kThreads) move_kernel(const Move p) {
  extern __shared__ __align__(128) uint4 s_state[];
  constexpr int kBytes = kThreads * kVectors * 16;
  const int slices = p.state_bytes / kBytes;
  int index = blockIdx.x;
  if constexpr (kOrder == Order::mixed) {  // neighbours are an eighth of the grid apart
    const int eighth = gridDim.x / 8;
    index = index % 8 * eighth + index / 8;
  }
  int slice = index % slices, state = index / slices;
  if constexpr (kOrder == Order::slices) {
    const int states = gridDim.x / slices;
    slice = index / states, state = index % states;
  }
  const int n = state / p.heads, h = state - n * p.heads;
  const int64_t base = p.slots[n] * p.slot_bytes + int64_t{h} * p.state_bytes;
  const auto at = [&](int i) { return base + place<kThreads, kVectors, kPattern, kRow>(slice, i); };
  if constexpr (kVia == Via::registers) {
    uint4 w[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) w[i] = load<kLoad>(p.from + at(i));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) store<kStore>(p.to + at(i), w[i]);
  } else if constexpr (kVia == Via::shared) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      copy_in<kLoad>(&s_state[i * kThreads + threadIdx.x], p.from + at(i));
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store<kStore>(p.to + at(i), s_state[i * kThreads + threadIdx.x]);
    }
  } else {  // one thread, one run in, one run out
    __shared__ uint64_t barrier;
    const auto s_barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    const auto s_data = static_cast<uint32_t>(__cvta_generic_to_shared(s_state));
    if (threadIdx.x != 0) return;
    const int64_t run = base + int64_t{slice} * kBytes;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(s_barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s_barrier),
                 "r"(kBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(s_data),
        "l"(p.from + run), "r"(kBytes), "r"(s_barrier)
        : "memory");
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred P;\nmbarrier.try_wait.parity.shared::cta.b64 P, [%1], 0;\n"
          "selp.u32 %0, 1, 0, P;\n}"
          : "=r"(done)
          : "r"(s_barrier)
          : "memory");
    }
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.to + run),
                 "r"(s_data), "r"(kBytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

}  // namespace probe
