// The recurrence on the GPU: takes every forward and decode call.
#pragma once

#include "core/problem.h"

namespace deltic::gpu {
struct Span;
}
namespace deltic::gpu::recurrence {

// Null: takes the call; else the sentence why not.
const char* refuse(const Problem& p);
// spans: where the N sequences lie, in device memory, at most T tokens each; the call is not packed
// then. Without o only states are written.
void run(const Problem& p, void* stream, const Span* spans = nullptr);

}  // namespace deltic::gpu::recurrence
