// The door of the move.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::move {

const Implementation& implementation();

}  // namespace deltic::gpu::move
