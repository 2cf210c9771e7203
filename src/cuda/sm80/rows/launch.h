// Building blocks that go row by row, on the GPU: gates, their cumulative sums, the L2 norm.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::rows {

// DELTIC_GATE, DELTIC_CUMSUM and DELTIC_L2NORM.
void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::rows
