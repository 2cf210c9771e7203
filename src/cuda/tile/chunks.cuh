// Tiles of 64 tokens, counted from the start of each sequence: four chunks of 16, two of 32 or one
// of 64. Every tile has a number, so that a grid can be sized without reading the lengths.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu {

inline constexpr int kTileTokens = 64;

struct TokenTile {
  int64_t batch, begin;    // row of the B dimension, first token in the T dimension
  int length;              // tokens, 0 to 64; 0: no such tile
  int64_t sequence;        // whose it is
  bool is_first, is_last;  // of its tiles
};

// Numbers of tiles, an upper bound: packed, sequence n has the numbers from cu[n] / 64 + n on,
// which leaves room for its last, partial tile and needs no table.
inline int64_t num_tiles(bool packed, int64_t N, int64_t T) {
  return packed ? T / kTileTokens + N : N * ((T + kTileTokens - 1) / kTileTokens);
}

__device__ inline int64_t first_tile(const Tokens& x, int64_t n) {
  return clamp_index(load_index(x.cu, n), 0, x.T) / kTileTokens + n;
}

// Numbers fit 32 bits, as CTAs do: a division of 64 bits is a hundred instructions.
__device__ inline TokenTile find_tile(const Tokens& x, unsigned number) {
  int64_t n = 0, tile = 0;
  if (!x.packed) {
    const unsigned tiles = static_cast<unsigned>((x.T + kTileTokens - 1) / kTileTokens);
    n = number / tiles, tile = number % tiles;
  } else {
    int64_t end = x.N;  // the sequence is in [n, end)
    while (end - n > 1) {
      const int64_t middle = (n + end) / 2;
      (first_tile(x, middle) <= number ? n : end) = middle;
    }
    tile = number - first_tile(x, n);
  }
  const Span span = span_of(x, n);
  const int64_t left = span.length - tile * kTileTokens;
  // A tile before the first of a list that decreases: no tile.
  if (tile < 0 || left <= 0) return {};
  return {span.batch,
          span.begin + tile * kTileTokens,
          static_cast<int>(left < kTileTokens ? left : kTileTokens),
          n,
          tile == 0,
          left <= kTileTokens};
}

}  // namespace deltic::gpu
