// beta k k^T, the scores, and both with the inverse of the first, on the GPU: every call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::scores {

// DELTIC_KKT, DELTIC_SCORES, and DELTIC_SCORES_INVERSE: both in one pass over q, k and G, the first
// one inverted.
void run(const Problem& p, void* stream);
// Null: takes the call; else the sentence why not.
const char* refuse(const Problem& p);

}  // namespace deltic::gpu::scores
