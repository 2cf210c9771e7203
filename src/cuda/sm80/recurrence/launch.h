// The recurrence on the GPU: takes every forward and decode call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::recurrence {

const char* refuse(const Problem& p);
void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::recurrence
