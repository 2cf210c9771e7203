// Which jobs fused CTAs have, in which order: each draws the next one by a ticket when its own is
// nearly done. Pure functions, for host and device.
//
// A job is a value head of a piece; those of a piece stand next to each other. Pieces of different
// lengths stand longest first, so that the CTAs end together: what is left at the end is short.
// Pieces of one length stand as they come, and CTA i has job i without a ticket.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace deltic::gpu::schedule {

// Each of so many pieces is compared with all others, by a thread of its own: at most 256
// instructions in a row and warp, about a microsecond. More stand as they come.
constexpr int kSortedPieces = 256;

// In the workspace, written by the planning kernel. CTAs take numbers from `next` alone.
struct Tickets {
  uint32_t next;  // the job that nobody has
  int pieces;     // whose jobs there are
  int is_sorted;  // they are those in `piece`; else as they come
  int piece[kSortedPieces];
};
// Chunks of the longest piece, and of the shortest that has any.
__host__ __device__ inline bool are_sorted(int pieces, int longest, int shortest, bool has_empty) {
  return pieces <= kSortedPieces && (has_empty || longest != shortest);
}
// The first ticket: without an order the first jobs are the CTAs' own.
__host__ __device__ inline uint32_t first_ticket(bool is_sorted, int ctas) {
  return is_sorted ? 0 : uint32_t(ctas);
}

// A piece's place: keys of all are different, the larger one comes first. Fewer than 2^23 chunks.
__host__ __device__ inline uint32_t sort_key(int chunks, int piece) {
  return uint32_t(chunks) * kSortedPieces + uint32_t(kSortedPieces - 1 - piece);
}
__host__ __device__ inline int place_among(const uint32_t* keys, int pieces, int piece) {
  const uint32_t own = keys[piece];
  int place = 0;
  for (int i = 0; i < pieces; i++) place += keys[i] > own;
  return place;
}

// Whether the CTA draws when it comes to a chunk of its job, with so many chunks left in it: once
// in every job. Not at its beginning, where it would keep a job that others could begin; early
// enough for trips to L2 and for the job's state, as chunks are found four steps before they are
// carried.
constexpr int kDrawnAhead = 2;
__host__ __device__ inline bool draws_at(int chunks_left, bool is_first) {
  return chunks_left == kDrawnAhead || (is_first && chunks_left > 0 && chunks_left < kDrawnAhead);
}

}  // namespace deltic::gpu::schedule
