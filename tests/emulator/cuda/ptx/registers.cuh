// Emulated: what the compiler for a GPU is told without an instruction.
#pragma once

#include <cstdint>

#include "cta.h"

namespace deltic::gpu {

template <class X>
inline X reread(const X& x) {
  emulator::Cta::current().look();
  return *reinterpret_cast<const volatile X*>(&x);
}
template <class X>
inline X opaque(X x) {
  return x;
}
template <class... X>
inline void keep_here(X&...) {}
inline void touch(uint32_t) {}
inline void compiler_fence() {}
inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline int grid_size() { return static_cast<int>(gridDim.x); }

}  // namespace deltic::gpu
