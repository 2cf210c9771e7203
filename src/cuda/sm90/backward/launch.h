// The door of the backward on Hopper: chunked, tensor cores, bf16 or fp16.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::gradient {

// `cuda.sm90.backward`, for the list of implementations.
const Implementation& implementation();

}  // namespace deltic::gpu::gradient
