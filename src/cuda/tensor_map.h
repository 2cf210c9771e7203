// Maps of tensors of rows for copies of boxes of 64 tokens and so many channels, two bytes each.
#pragma once

#include <cuda.h>

#include "core/problem.h"

namespace deltic::gpu {

// Whether rows can be copied so: an address and strides of sixteen bytes, where there is a stride.
bool is_16_bytes(const Rows& rows, int64_t heads, int64_t tokens, int64_t batches);

// (channel, head, token, batch). Boxes of 64 channels are tiles with 128-byte swizzle, those of 16
// rows of 32 bytes. What lies outside reads as 0 and is not written. In the name of `op`; fallback:
// any address, where there are no tokens.
enum class Box : uint32_t { narrow = 16, wide = 64 };
CUtensorMap make_map(const char* op, const Rows& rows, int64_t batches, int64_t tokens,
                     int64_t heads, int64_t width, void* fallback, Box channels = Box::wide);

}  // namespace deltic::gpu
