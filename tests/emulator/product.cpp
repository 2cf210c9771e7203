// A warp's part of a product of a warpgroup, with tiles read as their descriptors say.
#include <cuda_fp16.h>

#include <bit>
#include <cstring>

#include "cta.h"

namespace deltic::emulator {
namespace {

constexpr int kDepth = 16;

float value_of(uint16_t bits, bool is_half) {
  if (!is_half) return std::bit_cast<float>(uint32_t{bits} << 16);
  return __half2float(std::bit_cast<__half>(bits));
}

// Element (i, k) of a tile with 128-byte swizzle: i along rows of a or columns of b. Not turned: k
// is contiguous, eight i are eight rows of 128 bytes, the next eight `stride` on. Turned: 64 i are
// contiguous, the next 64 `lead` on; eight k are eight rows, the next eight `stride` on.
struct Tile {
  uint32_t first, lead, stride;
  bool is_turned;

  Tile(uint64_t desc, bool turned)
      : first(uint32_t(desc & 0x3FFF) << 4),
        lead(uint32_t(desc >> 16 & 0x3FFF) << 4),
        stride(uint32_t(desc >> 32 & 0x3FFF) << 4),
        is_turned(turned) {
    if (desc >> 62 != 1) fault("a tile of a product without 128-byte swizzle");
  }
  uint16_t operator()(uint32_t i, uint32_t k) const {
    uint32_t at = is_turned ? first + i / 64 * lead + i % 64 * 2 + k / 8 * stride + k % 8 * 128
                            : first + i / 8 * stride + i % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, shared_place(at), sizeof bits);
    return bits;
  }
};

}  // namespace

void multiply(const Product& p) {
  const int columns = 2 * p.registers;
  float a[16][kDepth], b[kDepth][128], c[16][128];
  const auto to_float = [&](uint32_t bits) { return value_of(uint16_t(bits), p.is_half); };
  if (p.has_a) {
    for (int l = 0; l < kWarpLanes; ++l)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a[l / 4 + i % 2 * 8][i / 2 * 8 + l % 4 * 2 + e] =
              to_float(p.a[size_t(l)][size_t(i)] >> (16 * e));
  } else {
    const Tile tile(p.a_tile, p.is_a_turned);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < kDepth; ++k)
        a[row][k] = to_float(tile(uint32_t(16 * p.warp + row), uint32_t(k)));
  }
  const Tile tile(p.b_tile, p.is_b_turned);
  for (int k = 0; k < kDepth; ++k)
    for (int n = 0; n < columns; ++n) b[k][n] = to_float(tile(uint32_t(n), uint32_t(k)));
  // Where a lane's accumulator i lies.
  const auto row_of = [](int l, int i) { return l / 4 + i / 2 % 2 * 8; };
  const auto column_of = [](int l, int i) { return i / 4 * 8 + l % 4 * 2 + i % 2; };
  for (int l = 0; l < kWarpLanes; ++l)
    for (int i = 0; i < p.registers; ++i)
      c[row_of(l, i)][column_of(l, i)] = p.keeps ? p.d[size_t(l)][i] : 0.0f;
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < columns; ++n) c[row][n] += a[row][k] * b[k][n];
  for (int l = 0; l < kWarpLanes; ++l)
    for (int i = 0; i < p.registers; ++i) p.d[size_t(l)][i] = c[row_of(l, i)][column_of(l, i)];
}

}  // namespace deltic::emulator
