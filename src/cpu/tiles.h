// AMX tiles: instructions, configuration, and whether they really run. Instructions are written
// out, so that no file needs compiler flags for them.
#pragma once

#include <cstdint>

namespace deltic::cpu {

#if defined(__x86_64__)
// Palette 1: 8 tiles of 16 rows of 64 bytes. Virtual machines may lack the CPUID leaves 0x1D and
// 0x1E that say so although the tiles work.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void tile_configure() {
  static constexpr TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void tile_load(const void* base, int64_t row_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(base), "r"(row_bytes) : "memory");
}
template <int kTile>
inline void tile_store(void* base, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(base), "r"(row_bytes) : "memory");
}
// acc[16][16] fp32 += a[16][32] bf16 * b[16][16 pairs] bf16
template <int kAcc, int kA, int kB>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAcc), "i"(kA), "i"(kB));
}
#endif

}  // namespace deltic::cpu
