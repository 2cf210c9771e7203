// What the inverse's kernel gets.
#pragma once

#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::inverse {

struct Params {
  Tokens tokens;
  int64_t heads;
  int64_t num_items;            // tiles times heads
  Rows a, out;                  // [B,T,HV,W]
  bool a_vectors, out_vectors;  // 16 bytes at a time
};

}  // namespace deltic::gpu::inverse
