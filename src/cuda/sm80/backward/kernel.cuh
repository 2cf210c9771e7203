// The general backward, fp32: a CTA takes (sequence, value head, slice of value columns) after
// (sequence, value head, slice), and nothing waits for another CTA.
#pragma once

#include "cuda/sm80/backward/stage_gradients.cuh"

namespace deltic::gpu::backward {

// Calls f for every item of this CTA, with the item and its span in shared memory.
template <class Tr, class F>
__device__ void for_items(const Params& p, Shared<Tr>& s, F&& f) {
  for (uint32_t index = blockIdx.x; index < p.num_items; index += gridDim.x) {
    if (threadIdx.x == 0) {
      s.item = item_of(p, index);
      s.span = span_of(p.tokens, s.item.n);
    }
    __syncthreads();  // the item
    load_parameters<Tr>(p, s);
    __syncthreads();  // its parameters
    f();
    __syncthreads();  // all are done with it
  }
}

// The states where segments after the first begin, into scratch.starts.
template <class Tr>
__global__ void __launch_bounds__(kThreads, 1) starts_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<Shared<Tr>*>(memory);
  if (is_wrong(p.tokens)) return;
  for_items<Tr>(p, s, [&] {
    const int64_t length = s.span.length;
    if (length <= p.segment) return;
    load_given_state<Tr>(p, p.initial, s, s.S);
    const int64_t end = (length - 1) / p.segment * p.segment;  // where the last one begins
    for (int64_t t = 0; t < end; t += kChunk) {
      go_forward<Tr>(p, s.span.begin + t, kChunk, s, nullptr, nullptr, nullptr);
      if ((t + kChunk) % p.segment == 0) {
        store_state<Tr>(start_of<Tr>(p, s, s.span.begin + t + kChunk), s.S);
      }
    }
  });
}

// Segment m of every sequence that has one: forward through it, keeping what backward needs of
// every chunk, then back. Segments are taken last to first, a launch each.
template <class Tr>
__global__ void __launch_bounds__(kThreads, 1)
    segment_kernel(const __grid_constant__ Params p, int64_t m) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<Shared<Tr>*>(memory);
  if (is_wrong(p.tokens)) return;
  const int64_t max_chunks = p.segment / kChunk;
  float* states = p.scratch.states + int64_t{blockIdx.x} * max_chunks * Tr::kState;
  float* errors = p.scratch.errors + int64_t{blockIdx.x} * max_chunks * kChunk * Tr::kColumns;
  float* scores = p.scratch.scores + int64_t{blockIdx.x} * max_chunks * 2 * kChunk * kChunk;
  for_items<Tr>(p, s, [&] {
    const int64_t begin = m * p.segment;
    if (begin >= s.span.length && m > 0) return;
    const int64_t end = min(begin + p.segment, s.span.length), left = s.span.length - end;
    const int64_t first = s.span.begin + begin;
    left > 0 ? load_state<Tr>(start_of<Tr>(p, s, s.span.begin + end), s.dS)
             : load_given_state<Tr>(p, p.d_final, s, s.dS);
    m > 0 ? load_state<Tr>(start_of<Tr>(p, s, first), s.S)
          : load_given_state<Tr>(p, p.initial, s, s.S);
    const int num = static_cast<int>((end - begin + kChunk - 1) / kChunk);
    const auto count_of = [&](int i) {
      return static_cast<int>(min(int64_t{kChunk}, end - begin - int64_t{kChunk} * i));
    };
    for (int i = 0; i < num; ++i) {
      go_forward<Tr>(p, first + kChunk * i, count_of(i), s, states + i * Tr::kState,
                     errors + i * kChunk * Tr::kColumns, scores + i * 2 * kChunk * kChunk);
    }
    for (int i = num - 1; i >= 0; --i) {
      const int64_t token = first + kChunk * i;
      go_back<Tr>(p, token, count_of(i), partial_row(p, s.item.n, s.span, token, kChunk * i), s,
                  states + i * Tr::kState, errors + i * kChunk * Tr::kColumns,
                  scores + i * 2 * kChunk * kChunk);
    }
    m > 0 ? store_state<Tr>(start_of<Tr>(p, s, first), s.dS)
          : store_given_state<Tr>(p, p.d_initial, s, s.dS);
  });
}

}  // namespace deltic::gpu::backward
