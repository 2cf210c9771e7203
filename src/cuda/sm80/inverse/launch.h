// (I + A)^-1 per chunk on the GPU: every call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::inverse {

void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::inverse
