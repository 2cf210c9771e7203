// What the move's kernels get.
#pragma once

#include "cuda/tile/slots.cuh"

namespace deltic::gpu::move {

struct Params {
  const uint64_t* record;    // of checked mode; null: not checked
  SlotLists slots;           // of the entries
  States from, to;           // [layers,slots,HV,K,V] by strides
  int64_t from_row, to_row;  // strides of rows, along the last dimension but one
  int64_t rows, columns;     // of a state as it lies in `from`
  int64_t layers, HV;
  int64_t row_tiles, column_tiles, num_tiles;  // of a state; of all
};

}  // namespace deltic::gpu::move
