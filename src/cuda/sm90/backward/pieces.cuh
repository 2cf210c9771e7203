// Sequences in segments: which piece has a number, and what the state at a border follows from.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/schedule/pieces.cuh"
#include "cuda/sm90/backward/params.h"
#include "cuda/tile/search.cuh"

namespace deltic::gpu::gradient {

// The number of a sequence's first piece.
__device__ inline int64_t first_piece_of(const Params& p, int64_t n) {
  if (p.segment == 0) return n;
  const auto first = static_cast<unsigned>(first_tile_of(p.tokens, n));
  const auto segment = static_cast<unsigned>(p.segment);
  if (p.tokens.packed) return first / segment + n;
  const auto tiles = static_cast<unsigned>((p.tokens.T + kTileTokens - 1) / kTileTokens);
  return n * max(1u, (tiles + segment - 1) / segment);
}

// The sequence that a piece's number belongs to.
__device__ inline int64_t sequence_of_piece(const Params& p, int64_t number) {
  if (p.segment == 0) return number;
  return last_begun(p.tokens.N, [&](int64_t n) { return first_piece_of(p, n) <= number; });
}

// By a warp. The state before chunk `border`, or is_back the gradient of it, follows from 0 so many
// chunks ahead (is_back: behind), whose gates have forgotten what was there; or from what the call
// gave, where these are the sequence's first (last) ones. -1: from more of them than a piece is
// worth. Bounds are of the head's own tokens, on one side of the border.
__device__ inline int chunks_ahead(const Params& p, int64_t first_tile, int64_t head, int border,
                                   int chunks, bool is_back) {
  if (border == (is_back ? chunks : 0)) return 0;
  const int lane = thread_index() % 32, most = max(1, p.segment / 2);
  const int c = is_back ? border + lane : border - 1 - lane;
  const bool has = lane < most && c >= 0 && c < chunks;
  float sum = has ? p.work.bound[(first_tile + c) * p.HV + head] : 0.0f;
#pragma unroll
  for (int m = 1; m < 32; m *= 2) {
    const float x = __shfl_up_sync(0xFFFFFFFFu, sum, m);
    if (lane >= m) sum += x;
  }
  const bool is_end = c == (is_back ? chunks - 1 : 0);
  const unsigned found =
      __ballot_sync(0xFFFFFFFFu, has && (is_end || sum <= -schedule::kForgottenBits));
  return found != 0 ? __ffs(static_cast<int>(found)) : -1;
}

}  // namespace deltic::gpu::gradient
