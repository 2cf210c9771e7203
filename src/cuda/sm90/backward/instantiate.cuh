// The launches of one instance.
#pragma once

#include "cuda/device.h"
#include "cuda/sm90/backward/chains.cuh"
#include "cuda/sm90/backward/gradients.cuh"
#include "cuda/sm90/backward/instantiate.h"
#include "cuda/sm90/backward/prepare_channels.cuh"
#include "cuda/sm90/backward/transfers.cuh"
#include "cuda/tile/launch.h"

namespace deltic::gpu::gradient {

// The launch may start while the one before ends; a kernel waits for it itself (begin_launch).
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), int64_t ctas, int threads, size_t smem,
                   cudaStream_t stream, const char* what, const Parameters&... parameters) {
  if (ctas == 0) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(smem)),
             what);
  check_cuda(launch_after(kernel, dim3(static_cast<unsigned>(ctas)), threads,
                          static_cast<int>(smem), stream, parameters...),
             what);
}

// A state's value columns as 64 to a CTA, or all of them: the tiles of keys are then read once. The
// bits are the same.
template <class E, int K, int V, int kBack, int kForward, bool kPerChannel>
void launch_chains(const Params& p, const Maps& maps, cudaStream_t stream) {
  using Back = ChainTraits<E, K, V, kBack, kPerChannel>;
  using Forward = ChainTraits<E, K, V, kForward, kPerChannel>;
  launch_kernel(chains_kernel<Back, Forward>, p.num_pieces * p.HV * (V / kBack) + p.forward_ctas,
                Back::kThreads, kChainBytes<Back, Forward>, stream,
                "kernel of the backward's chains", p, maps);
}
// The states at the borders of segments.
template <class E, int K, int V, bool kPerChannel>
void launch_transfers(const Params& p, const Maps& maps, cudaStream_t stream) {
  constexpr int kColumns = K == V ? V : 64;
  using Tr = ChainTraits<E, K, V, kColumns, kPerChannel>;
  launch_kernel(transfers_kernel<Tr>, p.num_pieces * p.HV * ((2 * V + K) / kColumns), Tr::kThreads,
                kChainBytes<Tr, Tr>, stream, "kernel of the backward's transfers", p, maps);
  using Merge = MergeTraits<E, K, V>;
  launch_kernel(merge_kernel<Merge>, int64_t{p.N} * p.HV * (2 * V / 64), kWarpgroup,
                sizeof(MergeShared<Merge>), stream, "kernel of the states between segments", p);
}

template <class E, int K, int V, bool kPerChannel>
void launch_values(const Params& p, const Maps& maps, cudaStream_t stream) {
  if (p.segment > 0) launch_transfers<E, K, V, kPerChannel>(p, maps, stream);
  if (p.back_columns == V) {
    launch_chains<E, K, V, V, V, kPerChannel>(p, maps, stream);
  } else {
    launch_chains<E, K, V, 64, kPerChannel ? V : 64, kPerChannel>(p, maps, stream);
  }
  using Tr = GradientTraits<E, K, V, kPerChannel>;
  static_assert(sizeof(GradientShared<Tr>) <= 232448, "shared memory of a CTA");
  launch_kernel(gradients_kernel<Tr>, std::min<int64_t>(p.num_tiles * p.H, kGradientCtas),
                Tr::kThreads, sizeof(GradientShared<Tr>), stream,
                "kernel of the backward's gradients", p);
}

template <class E, int K, bool kPerChannel>
void launch(const Params& p, const Maps& maps, cudaStream_t stream) {
  const char* const prepares = "kernel that prepares the backward";
  if constexpr (kPerChannel) {
    using Tr = ChannelTraits<E, K>;
    launch_kernel(prepare_channels_kernel<Tr>, p.num_tiles * p.HV, Tr::kThreads,
                  sizeof(ChannelShared<Tr>), stream, prepares, p);
  } else {
    launch_kernel(prepare_kernel<E, K>, p.num_tiles * (p.HV / p.prepare_heads), kPrepareThreads,
                  static_cast<size_t>(p.scores.smem_bytes), stream, prepares, p);
  }
  p.V == 64 ? launch_values<E, K, 64, kPerChannel>(p, maps, stream)
            : launch_values<E, K, 128, kPerChannel>(p, maps, stream);
}

#define DELTIC_INSTANTIATE_GRADIENT(E, K, kPerChannel) \
  template void launch<E, K, kPerChannel>(const Params&, const Maps&, cudaStream_t)

}  // namespace deltic::gpu::gradient
