// Emulated: stores of 16 and 8 bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cta.h"

namespace deltic::gpu {

template <class Words>
void store_words(void* to, const Words& w) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof w != 0)
    emulator::fault("a store of %zu bytes at an odd address", sizeof w);
  std::memcpy(to, &w, sizeof w);
}
inline void store_vector(void* to, const uint4& w) { store_words(to, w); }
inline void store_vector(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_words(to, uint4{a, b, c, d});
}
inline void store_vector(void* to, uint32_t a, uint32_t b) { store_words(to, uint2{a, b}); }
inline void store_vector(void* to, const uint4& w, bool is_there) {
  if (is_there) store_words(to, w);
}

}  // namespace deltic::gpu
