// beta k k^T, the scores, and both with the inverse of the first, on the GPU: every call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::scores {

// DELTIC_KKT and DELTIC_SCORES.
void run(const Problem& p, void* stream);

// Both in one pass over q, k and G: scale q k^T with decays (up to the diagonal) and
// (I + beta k k^T with decays)^-1. The problem is that of `scores` with beta; out is where the
// scores go.
void run_with_inverse(const Problem& p, const Rows& inverse, void* stream);

}  // namespace deltic::gpu::scores
