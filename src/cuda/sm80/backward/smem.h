// Shared memory of a CTA of the general backward.
#pragma once

#include <type_traits>

#include "cuda/sm80/backward/params.h"
#include "cuda/sm80/backward/traits.h"

namespace deltic::gpu::backward {

// Decays of value columns, and what their gradient needs. With them Shared::d_o and de are those of
// the state before the chunk (decayed from it), and y those of the state after it.
template <class Tr>
struct ColumnDecays {
  alignas(16) float b[Tr::kColumns][kChunk];
  alignas(16) float d_o[Tr::kColumns][kChunk], de[Tr::kColumns][kChunk], y[Tr::kColumns][kChunk];
  alignas(16) float z[Tr::kColumns][kChunk];  // y's gradient by the state after the chunk
  float total[Tr::kColumns];                  // the product of b
};
struct NoColumnDecays {};

// [key][token] and [column][token] arrays are read 16 tokens at a time by all threads at once.
template <class Tr>
struct Shared {
  // The state before the chunk, and the gradient of the one after it. The first is also where
  // sums over columns meet when it has been read.
  alignas(16) float S[Tr::kWidth][Tr::kStatePitch];
  alignas(16) float dS[Tr::kWidth][Tr::kStatePitch];
  alignas(16) float kE[Tr::kWidth][kChunk];                        // k exp(G)
  alignas(16) float kR[Tr::kWidth][kChunk];                        // k exp(G_last - G)
  alignas(16) float qE[Tr::kWidth][kChunk];                        // scale q exp(G)
  alignas(16) float k[kChunk][Tr::kWidth], q[kChunk][Tr::kWidth];  // after the norm
  alignas(16) float decay[kChunk][Tr::kWidth];
  alignas(16) float d_o[Tr::kColumns][kChunk], de[Tr::kColumns][kChunk], y[Tr::kColumns][kChunk];
  // Sums over keys of the parts, then du e of every token and column.
  alignas(16) float parts[Tr::kKeyParts][kChunk][Tr::kColumns];
  alignas(16) float L[kChunk][kChunk], P[kChunk][kChunk];    // [i][j], j < i and j <= i, else 0
  alignas(16) float dL[kChunk][kChunk], dP[kChunk][kChunk];  // likewise
  float last[Tr::kWidth];                                    // exp(G_last)
  float bias[Tr::kWidth];                                    // dt_bias of the head
  float rate;                                                // exp(A_log), or 1
  Item item;
  Span span;
  std::conditional_t<Tr::kHasGv, ColumnDecays<Tr>, NoColumnDecays> gv;
};

}  // namespace deltic::gpu::backward
