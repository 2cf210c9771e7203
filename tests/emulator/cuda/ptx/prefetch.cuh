// Emulated: lines of memory to L2. Nothing happens, but an address that is not the GPU's is found.
#pragma once

#include "machine.h"

namespace deltic::gpu {

inline void line_prefetch(const void* src) {
  if (!emulator::Machine::get().holds(src)) emulator::fault("a prefetch of no memory");
}
inline void line_prefetch_as_is(const void* src) { line_prefetch(src); }

}  // namespace deltic::gpu
