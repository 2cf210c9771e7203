// The door of the forward on Hopper: chunked, tensor cores, bf16 or fp16.
#pragma once

#include <cstddef>

#include "core/dispatch.h"

namespace deltic::gpu::forward {

// Null: takes the call; else the sentence why not. Looks at widths, dtypes, layouts and options.
const char* refuse(const Problem& p);
size_t workspace_bytes(const Problem& p);
// Everything is on the stream: no allocation, no synchronisation, nothing read by the host. May be
// captured, and replayed with other lengths and indices in the same buffers. The workspace needs no
// preparation.
void run(const Problem& p, void* workspace, void* stream);

// `cuda.sm90.forward`, for the list of implementations.
const Implementation& implementation();

}  // namespace deltic::gpu::forward
