// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/decode/kernel.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::decode {

template <class E, int kWidth, bool kVFirst, bool kPerChannel, Kind kKind>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  using Tr = TraitsOf<E, kWidth, kVFirst, kPerChannel, kKind>;
  constexpr int kBytes = sizeof(Stage<Tr>);
  if constexpr (kBytes > 48 * 1024) {
    static SharedMemory memory;
    memory.allow(reinterpret_cast<const void*>(decode_kernel<Tr>), kBytes, "decode kernel");
  }
  if constexpr (Tr::kStartsEarly) {
    check_cuda(launch_after(decode_kernel<Tr>, dim3(num_ctas), Tr::kThreads, kBytes, stream, p),
               "launch of the decode kernel");
  } else {
    decode_kernel<Tr><<<num_ctas, Tr::kThreads, kBytes, stream>>>(p);
  }
  check_launch("decode kernel");
}

#define DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, kKind)                                       \
  template void launch<E, kWidth, kVFirst, false, kKind>(const Params&, unsigned, cudaStream_t); \
  template void launch<E, kWidth, kVFirst, true, kKind>(const Params&, unsigned, cudaStream_t)
#define DELTIC_INSTANTIATE_DECODE(E, kWidth, kVFirst)         \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::several); \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::single);  \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::trees)
#define DELTIC_INSTANTIATE_HELD(E, kWidth)              \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::held); \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::few)

}  // namespace deltic::gpu::decode
