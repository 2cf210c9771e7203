// The launch of one instantiation of the drafts' kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/decode/kernel_drafts.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::decode {

template <class Tr>
size_t drafts_bytes() {
  return sizeof(DraftStage<Tr>);
}

template <class Tr>
void launch_drafts(const DraftParams& p, unsigned num_ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(DraftStage<Tr>);
  const auto kernel = drafts_kernel<Tr>;
  static SharedMemory memory;
  memory.allow(reinterpret_cast<const void*>(kernel), kBytes, "drafts kernel");
  check_cuda(launch_after(kernel, dim3(num_ctas), Tr::kThreads, kBytes, stream, p),
             "launch of the drafts kernel");
  check_launch("drafts kernel");
}

#define DELTIC_INSTANTIATE_DRAFT(...)                                                 \
  template void launch_drafts<DraftTraits<__VA_ARGS__>>(const DraftParams&, unsigned, \
                                                        cudaStream_t);                \
  template size_t drafts_bytes<DraftTraits<__VA_ARGS__>>()
#define DELTIC_INSTANTIATE_DRAFTS(kWidth, kVFirst)      \
  DELTIC_INSTANTIATE_DRAFT(kWidth, kVFirst, false, 8);  \
  DELTIC_INSTANTIATE_DRAFT(kWidth, kVFirst, true, 8);   \
  DELTIC_INSTANTIATE_DRAFT(kWidth, kVFirst, false, 16); \
  DELTIC_INSTANTIATE_DRAFT(kWidth, kVFirst, true, 16)

}  // namespace deltic::gpu::decode
