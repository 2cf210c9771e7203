// Copies of a few bytes per thread from global to shared memory that go by themselves (cp.async,
// sm_80 and later).
//
// What a thread asked for since its last commit is a group; groups arrive in order. Behind the wait
// the thread sees its own copies, behind a barrier after it those of others.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/ptx/shared.cuh"

namespace deltic::gpu {

// Leaves 16 bytes in shared memory behind the program's back: seen after wait and a barrier.
__device__ inline void copy_async(void* to, const void* from) {
  __pipeline_memcpy_async(to, from, 16);
}
// The same, or zeros; then nothing is read.
__device__ inline void copy_async(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_u32(to)),
               "l"(__cvta_generic_to_global(from)), "r"(is_there ? 16 : 0)
               : "memory");
}
// The same by one of two instructions: a branch, where it is not known which.
__device__ inline void copy_async_or_zero(void* to, const void* from, bool is_there) {
  __pipeline_memcpy_async(to, from, 16, is_there ? 0 : 16);
}
// Runs of 4, 8 or 16 bytes.
template <int kBytes>
__device__ inline void copy_run_async(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  __pipeline_memcpy_async(to, from, kBytes);
}

__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// The thread's own have arrived, but for the last kLeft groups.
template <int kLeft>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// But for the last `left` groups, at most three.
__device__ inline void copies_wait(int left) {
  if (left == 0) copies_wait<0>();
  if (left == 1) copies_wait<1>();
  if (left == 2) copies_wait<2>();
  if (left == 3) copies_wait<3>();
}

}  // namespace deltic::gpu
