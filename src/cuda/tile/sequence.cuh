// Where a sequence of a call lies, read on the device. Lengths, slots and lists that are out of
// range give undefined results, but no access outside of the tensors: everything is clamped here.
#pragma once

#include "core/problem.h"
#include "cuda/tile/element.cuh"

namespace deltic::gpu {

// The part of a call that says where tokens lie.
struct Tokens {
  Indices cu;
  bool packed;
  int64_t N, T;
  const uint64_t* record;  // of checked mode: all ones, or the call is wrong; null: not checked
  const Span* spans = nullptr;  // [N] in device memory, instead of lengths
};

// Whether the checks found something: then no kernel works.
__device__ inline bool is_wrong(const Tokens& x) {
  return x.record != nullptr && *x.record != ~0ull;
}

__device__ inline int64_t clamp_index(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

__device__ inline Span span_of(const Tokens& x, int64_t n) {
  if (x.spans != nullptr) return x.spans[n];
  if (!x.packed) return {n, 0, x.T};
  const int64_t begin = clamp_index(load_index(x.cu, n), 0, x.T);
  return {0, begin, clamp_index(load_index(x.cu, n + 1), begin, x.T) - begin};
}

// The first token of a packed call that belongs to no sequence.
__device__ inline int64_t padding_begin(const Tokens& x) {
  if (!x.packed) return x.T;
  return x.N > 0 ? clamp_index(load_index(x.cu, x.N), 0, x.T) : 0;
}

// Zero in every padding row of an output, by one CTA of `num`: all bits zero in every dtype.
__device__ inline void zero_padding(const Tokens& tokens, const Rows& x, int64_t heads,
                                    int64_t width, int64_t index, int64_t num) {
  if (!x.present) return;
  const int64_t first = padding_begin(tokens), rows = (tokens.T - first) * heads;
  for (int64_t r = index; r < rows; r += num) {
    const int64_t at = offset(x, 0, first + r / heads, r % heads);
    for (int64_t c = threadIdx.x; c < width; c += blockDim.x) store(x.data, x.dtype, at + c, 0.0f);
  }
}
inline constexpr int kPaddingCtas = 128;  // enough to write at memory speed, few enough to be free
// CTAs beyond those of all (sequence, value head, slice) write padding: whether this is one, and
// has.
template <class Params>
__device__ bool is_past_slices(const Params& p) {
  const int64_t num_slices = p.tokens.N * p.HV * p.num_slices;
  const unsigned index = blockIdx.x;
  if (index >= num_slices) {
    zero_padding(p.tokens, p.o, p.HV, p.V, index - num_slices, kPaddingCtas);
    return true;
  }
  return false;
}

}  // namespace deltic::gpu
