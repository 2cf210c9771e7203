// The recurrence on the GPU: takes every forward and decode call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu::recurrence {

// Null: takes the call; else the sentence why not.
const char* refuse(const Problem& p);
// Without o only states are written.
void run(const Problem& p, void* stream);

}  // namespace deltic::gpu::recurrence
