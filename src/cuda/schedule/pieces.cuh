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
  int is_short;               // a transfer's: its last chunks alone, what is before is forgotten
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

// A border behind which the state before these last chunks of a piece is forgotten needs no more
// than them: a transfer from 0. Forgotten: what is left of it is below 2^-kForgottenBits, far under
// fp32's rounding. Two chunks, since gates of -5 sigmoid(normal) reach 2^-35 in one.
constexpr int kShortChunks = 2;
constexpr float kForgottenBits = 40.f;
__host__ __device__ inline Piece shortened(Piece piece) {
  const int tokens = kShortChunks * kChunk;
  piece.token += piece.length - tokens, piece.length = tokens, piece.is_short = true;
  return piece;
}
// Borders have numbers: all tokens, sequence after sequence, in windows of `cut` chunks; in each at
// most one piece begins that is not its sequence's last. begin: of the piece, in all tokens.
__host__ __device__ inline int window_of(int begin, int cut) { return begin / (cut * kChunk); }
__host__ __device__ inline int num_windows(int tokens, int cut) {
  return (tokens + cut * kChunk - 1) / (cut * kChunk);
}
// Such a piece goes past its window's end: the first token after it, whose sequence [begin, end)
// then is the piece's; and that piece's end, -1 if there is none.
__host__ __device__ inline int after_window(int window, int cut) {
  return (window + 1) * cut * kChunk;
}
__host__ __device__ inline int border_in(int window, int begin, int end, int cut) {
  const int size = cut * kChunk, next = after_window(window, cut);
  if (next <= begin || next >= end) return -1;
  const int border = begin + ((next - begin - 1) / size + 1) * size;
  return border < end ? border : -1;
}

}  // namespace deltic::gpu::schedule
