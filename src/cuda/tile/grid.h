// Grids of the general kernels: one CTA per item of work in x, and CTAs that clear padding behind.
#pragma once

#include "core/error.h"
#include "cuda/tile/chunks.cuh"

namespace deltic::gpu {

inline Tokens tokens_of(const Problem& p) { return {p.cu, p.packed, p.N, p.T, p.record, p.spans}; }

inline unsigned checked_ctas(int64_t num, const char* implementation = "cuda.general") {
  if (num > INT32_MAX) {
    fail(DELTIC_UNSUPPORTED, implementation, ": expected work for at most 2^31 - 1 CTAs, got ",
         num);
  }
  return static_cast<unsigned>(num);
}

// The number of CTAs for `num_items` of work; 0: nothing to do.
inline unsigned num_ctas(const Problem& p, int64_t num_items,
                         const char* implementation = "cuda.general") {
  return checked_ctas(num_items + (p.packed && p.T > 0 ? kPaddingCtas : 0), implementation);
}

}  // namespace deltic::gpu
