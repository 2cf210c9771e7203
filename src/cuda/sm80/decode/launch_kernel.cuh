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
  static_assert(kBytes <= 48 * 1024, "more shared memory is to be asked for");
  if constexpr (Tr::kStartsEarly) {
    check_cuda(launch_after(decode_kernel<Tr>, dim3(num_ctas), Tr::kThreads, kBytes, stream, p),
               "launch of the decode kernel");
  } else {
    decode_kernel<Tr><<<num_ctas, Tr::kThreads, kBytes, stream>>>(p);
  }
  check_launch("decode kernel");
}

#define DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, kPerChannel)                                \
  template void launch<E, kWidth, kVFirst, kPerChannel, Kind::several>(const Params&, unsigned, \
                                                                       cudaStream_t);           \
  template void launch<E, kWidth, kVFirst, kPerChannel, Kind::single>(const Params&, unsigned,  \
                                                                      cudaStream_t);            \
  template void launch<E, kWidth, kVFirst, kPerChannel, Kind::trees>(const Params&, unsigned,   \
                                                                     cudaStream_t)
#define DELTIC_INSTANTIATE_MANY(E, kWidth, kPerChannel)                                    \
  template void launch<E, kWidth, false, kPerChannel, Kind::many>(const Params&, unsigned, \
                                                                  cudaStream_t)
#define DELTIC_INSTANTIATE_SEEDED(E, kWidth, kVFirst, kPerChannel)                             \
  template void launch<E, kWidth, kVFirst, kPerChannel, Kind::seeded>(const Params&, unsigned, \
                                                                      cudaStream_t)
#define DELTIC_INSTANTIATE_DECODE(E, kWidth, kVFirst) \
  DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, false); \
  DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, true)
// Of 16 bits.
#define DELTIC_INSTANTIATE_ROUNDED(E, kWidth, kVFirst)  \
  DELTIC_INSTANTIATE_DECODE(E, kWidth, kVFirst);        \
  DELTIC_INSTANTIATE_SEEDED(E, kWidth, kVFirst, false); \
  DELTIC_INSTANTIATE_SEEDED(E, kWidth, kVFirst, true)

}  // namespace deltic::gpu::decode
