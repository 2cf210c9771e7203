// The decode kernel's entry, cuda.decode: one or a few tokens per sequence at the speed at which
// states can be read and written.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::decode {

const Implementation& implementation();

}  // namespace deltic::gpu::decode
