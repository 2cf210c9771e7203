// Emulated: the GPU's clock, which goes on whenever somebody looks.
#pragma once

#include "cta.h"

namespace deltic::gpu {

inline uint64_t now_ns() { return emulator::Cta::current().clock(); }

}  // namespace deltic::gpu
