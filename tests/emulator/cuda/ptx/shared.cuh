// Emulated: shared memory, addresses, words, matrices of a warp.
#pragma once

#include <cstdint>
#include <cstring>

#include "cta.h"
#include "cuda/ptx/swizzle.cuh"

namespace deltic::gpu {

inline uint32_t smem_u32(const void* p) { return emulator::shared_address(p); }

template <class T>
T load_shared_as(uint32_t addr) {
  T v;
  std::memcpy(&v, emulator::shared_place(addr), sizeof v);
  return v;
}
template <class T>
void store_shared_as(uint32_t addr, const T& v) {
  std::memcpy(emulator::shared_place(addr), &v, sizeof v);
}

struct Matrices {  // four of 8 x 8 elements of two bytes; lanes 8 i .. 8 i + 7 name the rows of i
  uint32_t addr;
  uint32_t (*r)[4];
};
// The element of register i that lane l has in its lower (0) or upper half (1): of which row, at
// which byte.
template <bool kTurned>
void place_of_matrix(int l, int half, int& row, int& byte) {
  const int g = l / 4, x = 2 * (l % 4) + half;
  row = kTurned ? x : g, byte = 2 * (kTurned ? g : x);
}
template <bool kTurned>
void load_matrices(uint32_t (&r)[4], uint32_t addr) {
  Matrices own{addr, &r};
  emulator::together(~0u, own, [](Matrices** lanes, uint32_t) {
    for (int i = 0; i < 4; ++i)
      for (int row = 0; row < 8; ++row)
        if (lanes[8 * i + row]->addr % 16 != 0) emulator::fault("ldmatrix from an odd address");
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        uint32_t v = 0;
        for (int half = 0; half < 2; ++half) {
          int row, byte;
          place_of_matrix<kTurned>(l, half, row, byte);
          v |= uint32_t{load_shared_as<uint16_t>(lanes[8 * i + row]->addr + uint32_t(byte))}
               << (16 * half);
        }
        (*lanes[l]->r)[i] = v;
      }
  });
}
template <bool kTurned>
void store_matrices(uint32_t addr, const uint32_t (&r)[4]) {
  Matrices own{addr, const_cast<uint32_t(*)[4]>(&r)};
  emulator::together(~0u, own, [](Matrices** lanes, uint32_t) {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half) {
          int row, byte;
          place_of_matrix<kTurned>(l, half, row, byte);
          const uint32_t at = lanes[8 * i + row]->addr;
          if (at % 16 != 0) emulator::fault("stmatrix to an odd address");
          store_shared_as(at + uint32_t(byte), uint16_t((*lanes[l]->r)[i] >> (16 * half)));
        }
  });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) { load_matrices<false>(r, addr); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) { load_matrices<true>(r, addr); }
inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) { store_matrices<false>(addr, r); }
inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4]) {
  store_matrices<true>(addr, r);
}
inline void store_shared(uint32_t addr, uint32_t v) { store_shared_as(addr, v); }
inline uint32_t load_shared(uint32_t addr) { return load_shared_as<uint32_t>(addr); }
inline uint32_t load_shared_unordered(uint32_t addr) { return load_shared_as<uint32_t>(addr); }
inline int4 load_shared_int4(uint32_t addr) { return load_shared_as<int4>(addr); }
inline void store_shared_u16(uint32_t addr, uint16_t v) { store_shared_as(addr, v); }
inline void store_shared_f32(uint32_t addr, float v) { store_shared_as(addr, v); }
inline uint4 load_shared_volatile(uint32_t addr) { return load_shared_as<uint4>(addr); }
inline void store_shared_volatile(uint32_t addr, uint32_t v) { store_shared_as(addr, v); }

}  // namespace deltic::gpu
