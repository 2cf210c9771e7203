// The launches of one dtype's kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/conv/kernel.cuh"
#include "cuda/sm80/conv/kernels.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::conv {

// The kernel for a state's order, and for so many tokens.
template <class E>
void launch_drafts(const Params& p, unsigned ctas, int threads, cudaStream_t stream) {
  using Wide = Step<E, 4, true>;
  const bool is_staged = p.state_in.order != Order::channels, is_short = p.tokens.T <= kDrafts / 2;
  const auto kernel = is_staged ? (is_short ? drafts_kernel<Staged<E>, Order::inputs, kDrafts / 2>
                                            : drafts_kernel<Staged<E>, Order::inputs, kDrafts>)
                                : (is_short ? drafts_kernel<Wide, Order::channels, kDrafts / 2>
                                            : drafts_kernel<Wide, Order::channels, kDrafts>);
  const int bytes = is_staged ? threads * kStagedChannels * p.kept * int{sizeof(E)} : 0;
  check_cuda(launch_after(kernel, dim3(ctas), threads, bytes, stream, p),
             "launch of the convolution's kernel");
}

template <class E>
void launch_single(const Params& p, unsigned ctas, int threads, cudaStream_t stream) {
  using Tr = Single<E>;
  const auto kernel = p.state_in.order == Order::inputs
                          ? single_kernel<Tr, Order::inputs, kSingles>
                          : single_kernel<Tr, Order::channels, kSingles>;
  const int bytes = threads * (kSingles + 1) * Tr::kTaps * int{sizeof(uint4)};
  check_cuda(launch_after(kernel, dim3(ctas), threads, bytes, stream, p),
             "launch of the convolution's kernel");
}

template <class E, int kTaps, bool kWide>
void launch(Kernel kernel, const Params& p, unsigned ctas, int threads, cudaStream_t stream) {
  switch (kernel) {
    case Kernel::forward:
      check_cuda(
          launch_after(forward_kernel<Forward<E, kTaps, kWide>>, dim3(ctas), threads, 0, stream, p),
          "launch of the convolution's kernel");
      break;
    case Kernel::step:
      check_cuda(
          launch_after(step_kernel<Step<E, kTaps, kWide>>, dim3(ctas), threads, 0, stream, p),
          "launch of the convolution's kernel");
      break;
    case Kernel::single:
      if constexpr (kTaps == 4 && kWide) launch_single<E>(p, ctas, threads, stream);
      break;
    case Kernel::drafts:
      if constexpr (kTaps == 4 && kWide) launch_drafts<E>(p, ctas, threads, stream);
      break;
    case Kernel::checkpoints:
      check_cuda(
          launch_after(checkpoint_kernel<Step<E, kTaps, kWide>>, dim3(ctas), threads, 0, stream, p),
          "launch of the convolution's checkpoints");
      break;
    case Kernel::backward:
      check_cuda(launch_after(backward_kernel<Backward<E, kTaps, kWide>>, dim3(ctas), threads, 0,
                              stream, p),
                 "launch of the convolution's gradient");
      break;
  }
}

}  // namespace deltic::gpu::conv
