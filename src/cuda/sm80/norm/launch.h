// The gated RMS norm on the GPU, cuda.norm.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::norm {

const Implementation& implementation();

}  // namespace deltic::gpu::norm
