// The general implementation on the GPU, cuda.general: forward, backward, decode and the building
// blocks with their gradients, every option, fp32 arithmetic.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu {

// One entry serves every operation that it has: the problem says which it is.
const Implementation& general();
bool has_general(deltic_op op);

}  // namespace deltic::gpu
