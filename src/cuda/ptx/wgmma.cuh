// Warpgroup products (wgmma, sm_90a): m64 nN k16, bf16 or fp16 operands, fp32 accumulators.
// A comes from registers or shared memory, B from shared memory, both in tiles with 128-byte
// swizzle.
//
// The order of use: wgmma_arrive, the products, wgmma_commit, wgmma_wait<pending groups>. Between
// the arrival and the wait nothing may touch the accumulators, or ptxas serialises the products (it
// says so); fence_operands on both sides keeps the compiler away from them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/swizzle.cuh"

namespace deltic::gpu {

__device__ inline void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most so many groups are under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int N>
__device__ inline void fence_operands(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// clang-format off
#define DELTIC_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                        "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DELTIC_F16(d, i) DELTIC_F8(d, i), DELTIC_F8(d, i + 8)
#define DELTIC_F32(d, i) DELTIC_F16(d, i), DELTIC_F16(d, i + 16)
#define DELTIC_F64(d, i) DELTIC_F32(d, i), DELTIC_F32(d, i + 32)
#define DELTIC_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DELTIC_LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DELTIC_LIST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DELTIC_LIST_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                       "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                       "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// REGS accumulators of a thread (N / 2); P, Q, ...: the operands after them.
#define DELTIC_WGMMA_RS(TYPE, N, REGS, A0, A1, A2, A3, B, P, T)                                     \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P ", 0;\n"                                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTIC_LIST_##REGS \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #T "; }"            \
               : DELTIC_F##REGS(d, 0)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(keep)), "n"(int(kMajorB)))
#define DELTIC_WGMMA_SS(TYPE, N, REGS, A, B, P, TA, TB)                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P ", 0;\n"                                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTIC_LIST_##REGS \
               "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB "; }"                                  \
               : DELTIC_F##REGS(d, 0)                                                                \
               : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kMajorA)), "n"(int(kMajorB)))
// clang-format on

// d (64 x N) = a (64 x 16, registers) b (16 x N) + (keep ? d : 0); R = N / 2 accumulators a thread.
template <class Element, Major kMajorB, int R>
__device__ inline void wgmma(float (&d)[R], const uint32_t* a, uint64_t b, bool keep = true) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<Element, __half>);
  static_assert(R == 16 || R == 32 || R == 64, "N of 32, 64 or 128");
  if constexpr (R == 16 && kBf16) {
    DELTIC_WGMMA_RS("bf16", 32, 16, 16, 17, 18, 19, 20, 21, 22);
  } else if constexpr (R == 16) {
    DELTIC_WGMMA_RS("f16", 32, 16, 16, 17, 18, 19, 20, 21, 22);
  } else if constexpr (R == 32 && kBf16) {
    DELTIC_WGMMA_RS("bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
  } else if constexpr (R == 32) {
    DELTIC_WGMMA_RS("f16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
  } else if constexpr (kBf16) {
    DELTIC_WGMMA_RS("bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
  } else {
    DELTIC_WGMMA_RS("f16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
  }
}

// The same with a (64 x 16) in shared memory; N of 16 too.
template <class Element, Major kMajorA, Major kMajorB, int R>
__device__ inline void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool keep = true) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<Element, __half>);
  static_assert(R == 8 || R == 16 || R == 32 || R == 64, "N of 16, 32, 64 or 128");
  if constexpr (R == 8 && kBf16) {
    DELTIC_WGMMA_SS("bf16", 16, 8, 8, 9, 10, 11, 12);
  } else if constexpr (R == 8) {
    DELTIC_WGMMA_SS("f16", 16, 8, 8, 9, 10, 11, 12);
  } else if constexpr (R == 16 && kBf16) {
    DELTIC_WGMMA_SS("bf16", 32, 16, 16, 17, 18, 19, 20);
  } else if constexpr (R == 16) {
    DELTIC_WGMMA_SS("f16", 32, 16, 16, 17, 18, 19, 20);
  } else if constexpr (R == 32 && kBf16) {
    DELTIC_WGMMA_SS("bf16", 64, 32, 32, 33, 34, 35, 36);
  } else if constexpr (R == 32) {
    DELTIC_WGMMA_SS("f16", 64, 32, 32, 33, 34, 35, 36);
  } else if constexpr (kBf16) {
    DELTIC_WGMMA_SS("bf16", 128, 64, 64, 65, 66, 67, 68);
  } else {
    DELTIC_WGMMA_SS("f16", 128, 64, 64, 65, 66, 67, 68);
  }
}

#undef DELTIC_WGMMA_SS
#undef DELTIC_WGMMA_RS
#undef DELTIC_LIST_64
#undef DELTIC_LIST_32
#undef DELTIC_LIST_16
#undef DELTIC_LIST_8
#undef DELTIC_F64
#undef DELTIC_F32
#undef DELTIC_F16
#undef DELTIC_F8

// Registers per thread of this warpgroup, a multiple of 8. Taken only if the kernel has a cap at
// entry (__launch_bounds__ with a minimum of blocks), and the branch with the largest demand stands
// first.
template <int kRegisters>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace deltic::gpu
