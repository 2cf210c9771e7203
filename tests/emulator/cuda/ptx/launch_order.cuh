// Emulated: launches one after the other on a stream that overlap.
#pragma once

#include "cta.h"

namespace deltic::gpu {

inline void grid_release() { emulator::Cta::current().release_next_grid(); }
inline void grid_wait() { emulator::Cta::current().wait_for_grid(); }

}  // namespace deltic::gpu
