// Kernels of the progress test.
#include "gpu_progress_kernels.h"

namespace deltic::test {
namespace {

__device__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void hold(const __grid_constant__ SmSet set, int64_t nanoseconds, int* started) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (sm / 64 >= SmSet::kWords || (set.words[sm / 64] >> (sm % 64) & 1) == 0) return;
  if (started != nullptr) {
    reinterpret_cast<volatile int*>(started)[sm] = 1;
    __threadfence_system();
  }
  for (const uint64_t begin = now_ns(); now_ns() - begin < uint64_t(nanoseconds);) __nanosleep(200);
}

__global__ void compare(const uint32_t* a, const uint32_t* b, size_t words,
                        unsigned long long* count) {
  unsigned long long different = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words;
       i += size_t(gridDim.x) * blockDim.x)
    different += a[i] != b[i];
  if (different > 0) atomicAdd(count, different);
}

}  // namespace

cudaError_t hold_sms(const SmSet& set, int num_sms, int64_t nanoseconds, int* started,
                     cudaStream_t stream) {
  constexpr int kBytes = 227 * 1024;  // no other CTA with shared memory fits beside it
  const cudaError_t error =
      cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  hold<<<num_sms, 32, kBytes, stream>>>(set, nanoseconds, started);
  return cudaGetLastError();
}

cudaError_t count_differences(const void* a, const void* b, size_t bytes, unsigned long long* count,
                              cudaStream_t stream) {
  compare<<<64, 256, 0, stream>>>(static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b),
                                  bytes / 4, count);
  return cudaGetLastError();
}

}  // namespace deltic::test
