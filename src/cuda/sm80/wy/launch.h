// The WY pair and the decayed keys and queries on the GPU: every call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::wy {

void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::wy
