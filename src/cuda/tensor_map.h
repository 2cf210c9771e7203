// Maps of tensors of rows for copies of boxes of 64 tokens and 64 channels, two bytes each.
#pragma once

#include <cuda.h>

#include "core/problem.h"

namespace deltic::gpu {

// Whether rows can be copied so: an address and strides of sixteen bytes, where there is a stride.
bool is_16_bytes(const Rows& rows, int64_t heads, int64_t tokens, int64_t batches);

// (channel, head, token, batch), tiles with 128-byte swizzle. What lies outside reads as 0 and is
// not written. In the name of `op`; fallback: any address, where there are no tokens.
CUtensorMap make_map(const char* op, const Rows& rows, int64_t batches, int64_t tokens,
                     int64_t heads, int64_t width, void* fallback);

}  // namespace deltic::gpu
