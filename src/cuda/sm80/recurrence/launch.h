// The recurrence on the GPU: takes every forward and decode call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::recurrence {

void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::recurrence
