// How much forward keeps for backward, on every device.
#pragma once

#include <cmath>

#include "core/problem.h"

namespace deltic {

// Chunks per segment of a sequence: about the square root of the longest one's chunks, so that the
// states kept at segment starts and the chunks worked on at a time are both few.
//   T = 4096, chunk 64: 64 chunks, segments of 8, 7 states kept per sequence and head.
inline int64_t segment_chunks(const Problem& p) {
  const int64_t chunks = std::max<int64_t>(1, (p.T + p.chunk - 1) / p.chunk);
  return static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
}

// Sizes follow from shapes alone.
struct SavedSizes {
  int64_t segment = 1;  // chunks
  int64_t states = 0;   // room for so many per value head, over all sequences
  size_t bytes = 0;     // of the buffer
};

}  // namespace deltic
