// The rows of a record of drafted tokens, (sequence, token, value head): k, u and the decays.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/tile/element.cuh"

namespace deltic::gpu {

template <class Params>
__device__ float* update_row(const Params& p, int64_t layer, int64_t n, int64_t t, int64_t head) {
  // Not hoisted out of the loop over tokens, where its parts would spill registers.
  return static_cast<float*>(p.updates.data) + layer * p.update_layer +
         offset(p.updates, opaque(n), t, head);
}
template <class Params>
__device__ bool has_update(const Params& p, int64_t t) {
  return t < p.update_tokens;
}

// Rows from `first` on that no token has: they change nothing. By all threads of a CTA that has
// at.count value columns of a head; k and decays by that of the first ones.
template <int kThreads, class Params, class Slice>
__device__ void store_rest(const Params& p, const Slice& at, int64_t first) {
  const int64_t decays = p.gate == Gate::none ? 0 : p.gate == Gate::head ? 1 : p.K;
  for (int64_t t = first; t < p.update_tokens; ++t) {
    float* row = update_row(p, 0, at.n, t, at.head);
    for (int i = threadIdx.x; i < at.count; i += kThreads) row[p.K + at.first + i] = 0.0f;
    for (int i = threadIdx.x; i < p.K && at.first == 0; i += kThreads) row[i] = 0.0f;
    for (int i = threadIdx.x; i < decays && at.first == 0; i += kThreads) row[p.K + p.V + i] = 1.0f;
  }
}

}  // namespace deltic::gpu
