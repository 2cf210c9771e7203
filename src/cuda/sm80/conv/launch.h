// The convolution on the GPU, cuda.conv.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::conv {

const Implementation& implementation();

}  // namespace deltic::gpu::conv
