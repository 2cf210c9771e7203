// Grids of building blocks: (tile, head) pairs in x, and CTAs that clear padding behind them.
#pragma once

#include "core/error.h"
#include "cuda/tile/chunks.cuh"

namespace deltic::gpu {

inline Tokens tokens_of(const Problem& p) { return {p.cu, p.packed, p.N, p.T}; }

// The number of CTAs for `num_items` of work; 0: nothing to do.
inline unsigned num_ctas(const Problem& p, int64_t num_items) {
  const int64_t num = num_items + (p.packed && p.T > 0 ? kPaddingCtas : 0);
  if (num > INT32_MAX) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected work for at most 2^31 - 1 CTAs, got ", num);
  }
  return static_cast<unsigned>(num);
}

}  // namespace deltic::gpu
