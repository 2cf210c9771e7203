// What the inverse's kernel gets.
#pragma once

#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::inverse {

struct Params {
  Tokens tokens;
  int64_t heads;
  int64_t num_items, num_item_ctas;  // tiles times heads; CTAs for them
  Rows a, out;                       // [B,T,HV,W]
};

}  // namespace deltic::gpu::inverse
