// What the inverse's kernels get, and how their warps find their matrices.
#pragma once

#include <type_traits>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::inverse {

struct Params {
  Tokens tokens;
  int64_t heads;
  int64_t num_items, num_item_ctas;  // kernel.cuh: tiles times heads, others: matrices; their CTAs
  Rows a, out;                       // [B,T,HV,W]
};

// First of all, in a launch that may start before the one ahead ends: the next may start as well,
// and nothing in memory is touched before grid_wait. Lists and findings are needed at once; else
// the wait comes behind the search for the warp's matrices.
__device__ inline void start(const Tokens& x) {
  grid_release();
  if (x.packed || x.record != nullptr) grid_wait();
}

// A matrix is a chunk of a head; numbers count heads first, so that neighbours in memory have
// neighbouring numbers.
struct Matrix {
  int64_t batch, begin, head;
  // Tokens of its tile from its first on. W or more: all rows are there; 0 or less: none. Not
  // clamped to 0..W: ptxas 13.0 took `length == W` from the clamp's own predicates (VIMNMX.RELU),
  // wrongly.
  int left;
};

template <int W>
__device__ Matrix find_matrix(const Params& p, unsigned number) {
  if (number >= p.num_items) return {0, 0, 0, 0};
  constexpr unsigned kChunks = kTileTokens / W;
  const unsigned heads = static_cast<unsigned>(p.heads), chunk = number / heads;
  const TokenTile tile = find_tile(p.tokens, chunk / kChunks);
  const int skip = static_cast<int>(chunk % kChunks) * W;
  return {tile.batch, tile.begin + skip, number % heads, tile.length - skip};
}

// Rows of a matrix in memory, from an element of the first on: an address is one multiplication of
// 32 bits. The place is opaque, because the compiler would rather compute it anew, twenty
// instructions, wherever a row is touched under a condition.
template <class E>
struct MatrixRows {
  E* first;
  uint32_t step;  // bytes
  __device__ MatrixRows(const Rows& x, int64_t place)
      : step(static_cast<uint32_t>(x.st) * sizeof(E)) {
    const int64_t here = opaque(place);
    first = static_cast<E*>(x.data) + here;
  }
  __device__ E* operator[](unsigned r) const {
    using Byte = std::conditional_t<std::is_const_v<E>, const char, char>;
    return reinterpret_cast<E*>(reinterpret_cast<Byte*>(first) + uint64_t{step} * r);
  }
};

}  // namespace deltic::gpu::inverse
