// Sizes of a chunk's tiles in shared memory.
#pragma once

#include "cuda/schedule/costs.h"

namespace deltic::gpu::chunk {

using schedule::kChunk, schedule::kWidth;

constexpr int kHalfBytes = kChunk * 64 * 2;  // 64 tokens x 64 channels, 128-byte rows and swizzle
constexpr int kTileBytes = 2 * kHalfBytes;

}  // namespace deltic::gpu::chunk
