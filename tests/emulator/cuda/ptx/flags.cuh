// Emulated: flags in global memory between CTAs of a launch. Every look lets others have a turn.
#pragma once

#include <cstdint>

#include "cta.h"

namespace deltic::gpu {

inline uint32_t load_relaxed(const uint32_t* p) {
  emulator::Cta::current().poll();
  return *reinterpret_cast<const volatile uint32_t*>(p);
}
inline int load_unordered(const int* p) { return *reinterpret_cast<const volatile int*>(p); }
inline void fence_acquire() {}
inline void store_release(uint32_t* p, uint32_t v) { *reinterpret_cast<volatile uint32_t*>(p) = v; }
inline void add_release(uint32_t* p, uint32_t v) {
  auto* word = reinterpret_cast<volatile uint32_t*>(p);
  *word = *word + v;
}
inline uint32_t compare_and_swap(uint32_t* p, uint32_t from, uint32_t to) {
  auto* word = reinterpret_cast<volatile uint32_t*>(p);
  const uint32_t before = *word;
  if (before == from) *word = to;
  return before;
}
inline uint32_t draw(uint32_t* p) {
  emulator::Cta::current().poll();
  auto* word = reinterpret_cast<volatile uint32_t*>(p);
  const uint32_t before = *word;
  *word = before + 1;
  return before;
}
inline uint32_t exchange(uint32_t* p, uint32_t to) {
  auto* word = reinterpret_cast<volatile uint32_t*>(p);
  const uint32_t before = *word;
  *word = to;
  return before;
}
inline void wait_flag(const uint32_t* p, uint32_t at_least) {
  while (load_relaxed(p) < at_least) {
  }
}

}  // namespace deltic::gpu
