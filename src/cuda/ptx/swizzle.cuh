// Tiles in shared memory with 128-byte swizzle: places, and how products of a warpgroup name them.
#pragma once

#include <cstdint>

namespace deltic::gpu {

inline constexpr int kWarpgroup = 128, kWarpgroupWarps = 4;  // threads, warps

enum class Major { k = 0, mn = 1 };  // which dimension of a tile is contiguous

// Byte offset of 16 bytes in a 64-channel half tile.
__device__ inline uint32_t swizzled(int row, int chunk16) {
  return row * 128 + ((chunk16 ^ (row & 7)) << 4);
}

// Descriptor of a tile with 128-byte swizzle; strides in bytes.
__device__ inline uint64_t tile_desc(uint32_t addr, uint32_t lead, uint32_t stride) {
  return uint64_t((addr & 0x3FFFF) >> 4) | (uint64_t(lead >> 4) << 16) |
         (uint64_t(stride >> 4) << 32) | (uint64_t(1) << 62);
}
// The same tile some bytes further on.
__device__ inline uint64_t desc_at(uint64_t desc, uint32_t bytes) {
  return (desc & 0xffffffff00000000ull) | (uint32_t(desc) + (bytes >> 4));
}

}  // namespace deltic::gpu
