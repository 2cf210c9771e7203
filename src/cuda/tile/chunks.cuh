// Tiles of 64 tokens, counted from the start of each sequence: four chunks of 16, two of 32 or one
// of 64. Every tile has a number, so that a grid can be sized without reading the lengths.
#pragma once

#include "cuda/tile/search.cuh"
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

// Which tile of which sequence has a number; tiles may also have another power of two of tokens.
struct TilePlace {
  int64_t sequence, tile;
};
inline constexpr int kTileLog2 = 6;
static_assert(1 << kTileLog2 == kTileTokens);
__device__ inline int64_t first_tile(const Tokens& x, int64_t n, int tokens_log2 = kTileLog2) {
  return (clamp_index(load_index(x.cu, n), 0, x.T) >> tokens_log2) + n;
}
// Packed; a list that decreases gives a tile below 0. A sequence without tokens has one number.
__device__ inline TilePlace place_of_tile(const Tokens& x, int64_t number,
                                          int tokens_log2 = kTileLog2) {
  const int64_t n =
      last_begun(x.N, [&](int64_t i) { return first_tile(x, i, tokens_log2) <= number; });
  return {n, number - first_tile(x, n, tokens_log2)};
}

// Numbers fit 32 bits, as CTAs do: a division of 64 bits is a hundred instructions.
__device__ inline TokenTile find_tile(const Tokens& x, unsigned number) {
  int64_t n = 0, tile = 0;
  if (!x.packed) {
    const unsigned tiles = static_cast<unsigned>((x.T + kTileTokens - 1) / kTileTokens);
    n = number / tiles, tile = number % tiles;
  } else {
    const TilePlace place = place_of_tile(x, number);
    n = place.sequence, tile = place.tile;
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
