// The convolution and its gradient: which CTA has which runs of tokens and which channels.
#pragma once

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/conv/stage_backward.cuh"
#include "cuda/sm80/conv/stage_single.cuh"
#include "cuda/tile/search.cuh"

namespace deltic::gpu::conv {

// CTAs are (part, column of channels), columns fastest: neighbours in memory run together.
struct Place {
  unsigned part;
  int channel;  // a thread's first
};
template <class Tr>
__device__ Place find_place(const Params& p) {
  const unsigned part = blockIdx.x / p.num_columns, column = blockIdx.x - part * p.num_columns;
  return {part, static_cast<int>(column * blockDim.x + threadIdx.x) * Tr::kVec};
}

// The CTAs behind all parts write zeros to the rows of no sequence.
__device__ inline bool is_past_parts(const Params& p, const Rows& out) {
  const int64_t num = int64_t{p.num_parts} * p.num_columns;
  if (blockIdx.x < num) return false;
  zero_padding(p.tokens, out, 1, p.channels, blockIdx.x - num, kPaddingCtas);
  return true;
}

// Calls f with every run of a part.
template <class F>
__device__ void for_runs(const Params& p, unsigned part, F&& f) {
  const int begin = static_cast<int>(part) * p.runs_per_cta;
  const int end = begin + min(p.runs_per_cta, p.num_runs - begin);
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const Work s = find_work(p, i);
    // A number may have no tokens; an empty sequence's first has its states to move.
    if (s.count > 0 || s.is_first) f(s);
  }
}
// The same by all threads of the CTA together: the places of many runs are found at once, by a
// thread each, so that no run waits for its own.
template <class F>
__device__ void for_runs_together(const Params& p, unsigned part, F&& f) {
  constexpr int kFound = 32;
  __shared__ Work s_work[kFound];
  const int begin = static_cast<int>(part) * p.runs_per_cta;
  const int end = begin + min(p.runs_per_cta, p.num_runs - begin);
#pragma unroll 1
  for (int left = end - begin; left > 0; left -= kFound) {
    const int first = end - left, count = min(left, kFound);
    const int thread = static_cast<int>(threadIdx.x);
    if (first > begin) __syncthreads();  // the places before have been read by all threads
    if (thread < count) s_work[thread] = find_work(p, first + thread);
    __syncthreads();  // the places are there, for all threads
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Work s = s_work[i];
      if (s.count > 0 || s.is_first) f(s);
    }
  }
}

template <class Tr>
__device__ void run_forward(const Params& p, const Work& s, int c, const Taps<Tr>& taps) {
  if (s.is_skipped) return zero_run<Tr>(p, s, c);
  Ring<Tr> x(p.x, s, c, s.count);
  float before[Tr::kBefore][Tr::kVec];
  load_before<Tr>(p, s, c, before);
  run_tokens<Tr>(p, s, c, taps, x, before);
  if (s.is_first && s.to >= 0) leave_state<Tr>(p, s, c, before);
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kCtas)
    forward_kernel(const __grid_constant__ Params p) {
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens) || is_past_parts(p, p.out)) return;
  const Place at = find_place<Tr>(p);
  if (at.channel >= p.channels) return;
  Taps<Tr> taps;
  load_taps<Tr>(p, at.channel, taps);
  for_runs(p, at.part, [&](const Work& s) { run_forward<Tr>(p, s, at.channel, taps); });
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kCtas)
    step_kernel(const __grid_constant__ Params p) {
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens) || is_past_parts(p, p.out)) return;
  const Place at = find_place<Tr>(p);
  const bool has_channels = at.channel < p.channels;  // the others come to the barriers
  Taps<Tr> taps;
  if (has_channels) load_taps<Tr>(p, at.channel, taps);
  for_runs_together(p, at.part, [&](const Work& s) {
    if (has_channels) run_forward<Tr>(p, s, at.channel, taps);
  });
}

// One token per sequence, dense, four taps, states of W - 1 inputs that move by runs; everything in
// one dtype. Starts before the launch ahead of it ends.
template <class Tr, Order kOrder, int kSequences>
__global__ void __launch_bounds__(kSingleThreads, Tr::kCtas)
    single_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 s_pieces[];
  grid_wait();
  grid_release();  // a decode behind it asks L2 for its states meanwhile
  if (is_wrong(p.tokens)) return;
  const Place at = find_place<Tr>(p);
  if (at.channel >= p.channels) return;
  const int first = static_cast<int>(at.part) * kSequences;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Lanes lanes{lane, min(32, (p.channels - at.channel) / Tr::kVec + lane)};
  run_singles<Tr, kOrder, kSequences>(p, first, at.channel, lanes,
                                      s_pieces + warp * (kSequences + 1) * Tr::kTaps * 32);
}

// A few tokens per sequence, dense, four taps, states of W - 1 inputs or windows of drafts; a CTA
// has a sequence. Everything in one dtype. Starts before the launch ahead of it ends.
template <class Tr, Order kOrder, int kTokens>
__global__ void __launch_bounds__(kThreads, Tr::kCtas)
    drafts_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 s_pieces[];
  grid_wait();
  grid_release();  // a decode behind it asks L2 for its states meanwhile
  if (is_wrong(p.tokens)) return;
  const Place at = find_place<Tr>(p);
  const int first = at.channel - static_cast<int>(threadIdx.x) * Tr::kVec;
  const StagedState<Tr> staged{reinterpret_cast<typename Tr::E*>(s_pieces), p.kept, first,
                               min(p.channels - first, static_cast<int>(blockDim.x) * Tr::kVec)};
  run_drafts<Tr, kOrder, kTokens>(p, static_cast<int>(at.part), at.channel, staged);
}

// A CTA per entry of the checkpoint lists and column, before the states are written.
template <class Tr>
__global__ void __launch_bounds__(kThreads) checkpoint_kernel(const __grid_constant__ Params p) {
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens)) return;
  const Place at = find_place<Tr>(p);
  if (at.channel >= p.channels) return;
  const int64_t m = at.part;
  const int n = list_of_entry(p.ckpt_cu, static_cast<int>(p.tokens.N), m).last;
  if (m < load_index(p.ckpt_cu, n) || m >= load_index(p.ckpt_cu, n + 1)) return;
  const int64_t slot =
      named_slot(load_index(p.ckpt_slots, m), p.slots.null_slot, p.ckpt.states.slots);
  const Work s = find_work(p, n);
  if (slot < 0 || s.is_skipped) return;
  const int64_t tokens = clamp_index(load_index(p.ckpt_tokens, m), 0, s.length);
  leave_checkpoint<Tr>(p, s, static_cast<int>(tokens), static_cast<int>(slot), at.channel);
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kCtas)
    backward_kernel(const __grid_constant__ Params p) {
  __shared__ typename Pairs<Tr>::Shared s_rows;
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens) || is_past_parts(p, p.dx)) return;
  const Place at = find_place<Tr>(p);
  if (at.channel >= p.channels) return;
  Taps<Tr> taps;
  load_taps<Tr>(p, at.channel, taps);
  Sums<Tr> sums{};
  for_runs(p, at.part,
           [&](const Work& s) { run_gradients<Tr>(p, s, at.channel, taps, sums, s_rows); });
  if (p.wants_sums) leave_sums<Tr>(p, at.part, at.channel, taps, sums);
}

}  // namespace deltic::gpu::conv
