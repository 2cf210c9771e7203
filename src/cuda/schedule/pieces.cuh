// Sequences cut into pieces: pure functions, for the host and for the planning kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/schedule/costs.h"

namespace deltic::gpu::schedule {

// A sequence, or one segment of it.
struct Piece {
  int token, length;          // in the T dimension
  int batch;                  // in the B dimension
  int read_slot, write_slot;  // of the sequence's states; -1: zero, nowhere
  int zero;                   // skipped sequence: tokens whose o is 0; length is 0
  int is_last;                // of the sequence
  int first_chunk;            // in the sequence
  int end_stash;              // whose place takes the state after the sequence's end; -1: nobody's
};

__host__ __device__ inline int chunks_of(int tokens) { return (tokens + kChunk - 1) / kChunk; }
// Of a sequence with so many chunks, `cut` of them to a piece; 0: it stays whole. An empty one is a
// piece, too.
__host__ __device__ inline int num_pieces(int chunks, int cut) {
  return cut > 0 && chunks > 0 ? (chunks + cut - 1) / cut : 1;
}
// Piece j of `count`.
__host__ __device__ inline Piece piece_at(const Piece& whole, int cut, int count, int j) {
  Piece piece = whole;
  if (count > 1) {
    piece.token += j * cut * kChunk;
    piece.length = min(whole.length - j * cut * kChunk, cut * kChunk);
    piece.first_chunk = j * cut, piece.is_last = j + 1 == count;
  }
  return piece;
}

}  // namespace deltic::gpu::schedule
