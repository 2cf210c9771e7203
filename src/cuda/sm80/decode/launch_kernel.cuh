// The launch of one instantiation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/decode/kernel.cuh"
#include "cuda/sm80/decode/kernel_alone.cuh"
#include "cuda/sm80/decode/kernel_stream.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::decode {

// Of kLists: rows of a packed call by the strides of a batch, whose only row is the first.
inline Params rows_for_sequences(Params p) {
  if (p.tokens.packed) {
    for (Rows* x : {&p.q, &p.k, &p.v, &p.o, &p.beta, &p.g}) x->sb = x->st;
  }
  return p;
}

// One token by warps alone; another warp hints.
template <class Tr>
void launch_alone(const Params& p, cudaStream_t stream) {
  const dim3 grid(p.num_slices, p.HV, static_cast<unsigned>(p.tokens.N));
  AloneParamsOf<Tr> params;
  if constexpr (Tr::kLists) {
    params = listed_params(rows_for_sequences(p));
  } else {
    params = alone_params(p);
  }
  check_cuda(launch_after(alone_kernel<Tr>, grid, Tr::kThreads + 32, 0, stream, params),
             "launch of the decode kernel");
  check_launch("decode kernel");
}

// Several tokens by CTAs that stay. X: of q, k, v and o.
template <class Tr, class X>
void launch_stream(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(StreamStage<Tr, X>);
  const auto kernel = stream_kernel<Tr, X>;
  static SharedMemory memory;
  memory.allow(reinterpret_cast<const void*>(kernel), kBytes, "decode kernel");
  check_cuda(launch_after(kernel, dim3(num_ctas), Tr::kThreads, kBytes, stream, p),
             "launch of the decode kernel");
  check_launch("decode kernel");
}

template <class Tr>
void launch_slices(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Stage<Tr>);
  if constexpr (kBytes > 48 * 1024) {
    static SharedMemory memory;
    memory.allow(reinterpret_cast<const void*>(decode_kernel<Tr>), kBytes, "decode kernel");
  }
  if constexpr (Tr::kStartsEarly) {
    check_cuda(launch_after(decode_kernel<Tr>, dim3(num_ctas), Tr::kThreads, kBytes, stream, p),
               "launch of the decode kernel");
  } else {
    check_cuda(gpu::launch(decode_kernel<Tr>, num_ctas, Tr::kThreads, kBytes, stream, p),
               "launch of the decode kernel");
  }
  check_launch("decode kernel");
}

template <class E, int kWidth, bool kVFirst, bool kPerChannel, Kind kKind>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream) {
  using Tr = TraitsOf<E, kWidth, kVFirst, kPerChannel, kKind>;
  if constexpr (kKind == Kind::alone || kKind == Kind::listed_alone) {
    launch_alone<Tr>(p, stream);
  } else if constexpr (kKind == Kind::stream) {
    p.q.dtype == DType::f16 ? launch_stream<Tr, __half>(p, num_ctas, stream)
                            : launch_stream<Tr, __nv_bfloat16>(p, num_ctas, stream);
  } else if constexpr (Tr::kLists) {
    launch_slices<Tr>(rows_for_sequences(p), num_ctas, stream);
  } else {
    launch_slices<Tr>(p, num_ctas, stream);
  }
}

#define DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, kPerChannel, kKind)                 \
  template void launch<E, kWidth, kVFirst, kPerChannel, kKind>(const Params&, unsigned, \
                                                               cudaStream_t)
#define DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, kKind)   \
  DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, false, kKind); \
  DELTIC_INSTANTIATE_GATE(E, kWidth, kVFirst, true, kKind)
#define DELTIC_INSTANTIATE_DECODE(E, kWidth, kVFirst)         \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::several); \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::single);  \
  DELTIC_INSTANTIATE_KIND(E, kWidth, kVFirst, Kind::trees)
#define DELTIC_INSTANTIATE_V_FIRST(E, kWidth)                    \
  DELTIC_INSTANTIATE_DECODE(E, kWidth, true);                    \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::alone);         \
  DELTIC_INSTANTIATE_GATE(E, kWidth, true, false, Kind::listed); \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::listed_alone);  \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::held);          \
  DELTIC_INSTANTIATE_KIND(E, kWidth, true, Kind::few)

}  // namespace deltic::gpu::decode
