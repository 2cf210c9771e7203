// States from slot to slot: a CTA per tile of a state. Where rows become columns the tile is turned
// in shared memory, so that both sides are read and written in whole lines.
#pragma once

#include <type_traits>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/vectors.cuh"
#include "cuda/sm80/move/params.h"
#include "cuda/sm80/move/traits.h"

namespace deltic::gpu::move {

// N numbers as they are written.
template <class E, int N>
struct alignas(sizeof(E) * N) Pack {
  E x[N];
};

// How numbers come and go: of types that are known, and of those that the call names. The same type
// keeps its bits, those of a NaN too.
template <class Tr>
struct Numbers {
  using In = typename Tr::In;
  using Out = typename Tr::Out;
  using Run = Pack<uint32_t, Tr::kVec* int{sizeof(Out)} / 4>;

  static __device__ Run load(const Params& p, int64_t at) {
    const In* from = static_cast<const In*>(p.from.data) + at;
    if constexpr (__is_same(In, Out)) {
      return *reinterpret_cast<const Run*>(from);
    } else {
      const auto in = *reinterpret_cast<const Pack<In, Tr::kVec>*>(from);
      Pack<Out, Tr::kVec> out;
#pragma unroll
      for (int i = 0; i < Tr::kVec; ++i) out.x[i] = from_float<Out>(to_float(in.x[i]));
      Run run;
      memcpy(&run, &out, sizeof(run));
      return run;
    }
  }
  static __device__ void store(const Params& p, int64_t at, const Run& run) {
    Out* to = static_cast<Out*>(p.to.data) + at;
    if constexpr (sizeof(Run) == 16) {
      store_vector(to, run.x[0], run.x[1], run.x[2], run.x[3]);
    } else {
      store_vector(to, run.x[0], run.x[1]);
    }
  }
  static __device__ Run zero() {
    Run run;
    memset(&run, 0, sizeof(run));
    return run;
  }
};
template <bool kTransposed>
struct Numbers<Traits<void, void, kTransposed>> {
  using Run = Pack<uint32_t, 1>;  // bits: the low 16 of a narrow type

  static __device__ Run load(const Params& p, int64_t at) {
    if (p.from.dtype == p.to.dtype) {
      return {p.from.dtype == DType::f32 ? static_cast<const uint32_t*>(p.from.data)[at]
                                         : static_cast<const uint16_t*>(p.from.data)[at]};
    }
    const float x = gpu::load(p.from.data, p.from.dtype, at);
    switch (p.to.dtype) {
      case DType::bf16:
        return {__bfloat16_as_ushort(from_float<__nv_bfloat16>(x))};
      case DType::f16:
        return {__half_as_ushort(from_float<__half>(x))};
      default:
        return {__float_as_uint(x)};
    }
  }
  static __device__ void store(const Params& p, int64_t at, const Run& run) {
    if (p.to.dtype == DType::f32) {
      static_cast<uint32_t*>(p.to.data)[at] = run.x[0];
    } else {
      static_cast<uint16_t*>(p.to.data)[at] = static_cast<uint16_t>(run.x[0]);
    }
  }
  static __device__ Run zero() { return {0}; }
};

// Where a tile of the call is.
struct Place {
  int64_t from, to;       // the state's first numbers
  int64_t row, column;    // the tile's first ones
  bool is_zero, is_none;  // nothing to read; nothing to do
};
// index: (entry, layer, head, tile), tiles fastest.
template <class Int>
__device__ Place find_tile(const Params& p, Int index, int tile_rows, int tile_columns) {
  const Int columns = static_cast<Int>(p.column_tiles),
            tiles = static_cast<Int>(p.row_tiles) * columns;
  const Int job = index / tiles, tile = index - job * tiles;
  const Int states = job / static_cast<Int>(p.HV), head = job - states * static_cast<Int>(p.HV);
  const Int n = states / static_cast<Int>(p.layers),
            layer = states - n * static_cast<Int>(p.layers);
  const Slots<int64_t> slots = find_slots<int64_t>(p.slots, n);
  Place at;
  at.is_none = slots.to < 0, at.is_zero = slots.from < 0;
  at.from = slots.from * p.from.s_slot + head * p.from.s_head + layer * p.from.s_layer;
  at.to = slots.to * p.to.s_slot + head * p.to.s_head + layer * p.to.s_layer;
  at.row = static_cast<int64_t>(tile / columns) * tile_rows;
  at.column = static_cast<int64_t>(tile % columns) * tile_columns;
  return at;
}

// A tile on its way from rows to columns. Single numbers: columns of 64 and one more. Blocks:
// [column][block of rows], in pieces of kWords words.
template <class Tr>
struct Turned {
  uint32_t words[Tr::kTransposed ? 64 : 1][65];
};
template <class Tr>
requires Tr::kBlocks struct Turned<Tr> {
  Pack<uint32_t, Tile<Tr>::kWords> pieces[Tile<Tr>::kColumns][Tr::kEdge];
};

// Rows that stay rows, and single numbers whose rows become columns.
template <class Tr>
__device__ void move_tile(const Params& p, const Place& at, Turned<Tr>& s) {
  using T = Tile<Tr>;
  using N = Numbers<Tr>;
  const int lane = threadIdx.x % T::kLanes, first = threadIdx.x / T::kLanes;
  typename N::Run run[T::kRuns];
  const int64_t column = at.column + lane * Tr::kVec;
#pragma unroll
  for (int i = 0; i < T::kRuns; ++i) {
    const int64_t row = at.row + first + i * T::kStep;
    const bool is_there = row < p.rows && column < p.columns && !at.is_zero;
    run[i] = is_there ? N::load(p, at.from + row * p.from_row + column) : N::zero();
  }
  if constexpr (!Tr::kTransposed) {
#pragma unroll
    for (int i = 0; i < T::kRuns; ++i) {
      const int64_t row = at.row + first + i * T::kStep;
      if (row < p.rows && column < p.columns) N::store(p, at.to + row * p.to_row + column, run[i]);
    }
  } else {
    auto& turned = s.words;
    __syncthreads();  // the tile before has been read by all threads
#pragma unroll
    for (int i = 0; i < T::kRuns; ++i) turned[lane][first + i * T::kStep] = run[i].x[0];
    __syncthreads();  // the tile is there, for all threads
    const int64_t out_column = at.row + lane;
#pragma unroll
    for (int i = 0; i < T::kRuns; ++i) {
      const int c = first + i * T::kStep;
      const int64_t out_row = at.column + c;
      if (out_row >= p.columns || out_column >= p.rows) continue;
      N::store(p, at.to + out_row * p.to_row + out_column, {turned[c][lane]});
    }
  }
}

// The columns of a block of kVec x kVec numbers, of which `rows` are rows: kWords words each.
template <int kVec, int kWords>
__device__ void turn_block(const uint32_t (&rows)[kVec][kWords],
                           uint32_t (&columns)[kVec][kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      if constexpr (kVec == kWords) {
        columns[j][i] = rows[i][j];
      } else {
        // Numbers of 16 bits: column 2 j or 2 j + 1, rows 2 i and 2 i + 1.
        columns[2 * j][i] = __byte_perm(rows[2 * i][j], rows[2 * i + 1][j], 0x5410);
        columns[2 * j + 1][i] = __byte_perm(rows[2 * i][j], rows[2 * i + 1][j], 0x7632);
      }
    }
  }
}

// Rows become columns, by blocks: each thread turns one, and in shared memory columns of neighbours
// come together. Pieces of a column are exchanged by its block, so that neither side meets a bank
// twice: threads of a warp have neighbouring columns' blocks when they write and neighbouring
// pieces when they read.
template <class Tr>
requires Tr::kBlocks __device__ void move_tile(const Params& p, const Place& at, Turned<Tr>& s) {
  using T = Tile<Tr>;
  using N = Numbers<Tr>;
  const int lane = threadIdx.x % Tr::kEdge, block = threadIdx.x / Tr::kEdge;
  const auto piece_of = [](int piece, int column_block) {
    return piece ^ static_cast<int>(column_block & (T::kChunksOfBanks - 1) & (Tr::kEdge - 1));
  };
  uint32_t rows[Tr::kVec][T::kWords], columns[Tr::kVec][T::kWords];
  {
    const int64_t row = at.row + block * Tr::kVec, column = at.column + lane * Tr::kVec;
    const bool is_there = row < p.rows && column < p.columns && !at.is_zero;
#pragma unroll
    for (int i = 0; i < Tr::kVec; ++i) {
      const auto run = is_there ? N::load(p, at.from + (row + i) * p.from_row + column) : N::zero();
      memcpy(rows[i], &run, sizeof(run));
    }
  }
  turn_block(rows, columns);
  __syncthreads();  // the tile before has been read by all threads
#pragma unroll
  for (int j = 0; j < Tr::kVec; ++j) {
    memcpy(&s.pieces[lane * Tr::kVec + j][piece_of(block, lane)], columns[j], sizeof(columns[j]));
  }
  __syncthreads();  // the tile is there, for all threads
  const int64_t row = at.column + block * Tr::kVec, column = at.row + lane * Tr::kVec;
  if (row >= p.columns || column >= p.rows) return;
#pragma unroll
  for (int j = 0; j < Tr::kVec; ++j) {
    typename N::Run run;
    memcpy(&run, &s.pieces[block * Tr::kVec + j][piece_of(lane, block)], sizeof(run));
    N::store(p, at.to + (row + j) * p.to_row + column, run);
  }
}

// Starts before the launch ahead of it ends, and lets the next one come.
template <class Tr>
__global__ void __launch_bounds__(Tile<Tr>::kThreads, ctas_per_sm<Tr>())
    move_kernel(const __grid_constant__ Params p) {
  __shared__ Turned<Tr> turned;
  grid_wait();
  grid_release();
  if (p.record != nullptr && *p.record != ~0ull) return;
  const bool is_small = p.num_tiles <= INT32_MAX;  // divisions of 32 bits
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < p.num_tiles; i += gridDim.x) {
    using T = Tile<Tr>;
    const Place at = is_small ? find_tile(p, static_cast<uint32_t>(i), T::kRows, T::kColumns)
                              : find_tile(p, i, T::kRows, T::kColumns);
    if (!at.is_none) move_tile<Tr>(p, at, turned);  // the same for all threads
  }
}

}  // namespace deltic::gpu::move
