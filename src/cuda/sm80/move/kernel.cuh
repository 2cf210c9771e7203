// States from slot to slot: a CTA per tile of a state. Where rows become columns the tile is turned
// in shared memory, so that both sides are read and written in whole lines.
#pragma once

#include <type_traits>

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
  using Run = Pack<Out, Tr::kVec>;

  static __device__ Run load(const Params& p, int64_t at) {
    const auto in =
        *reinterpret_cast<const Pack<In, Tr::kVec>*>(static_cast<const In*>(p.from.data) + at);
    if constexpr (__is_same(In, Out)) {
      return in;
    } else {
      Run out;
#pragma unroll
      for (int i = 0; i < Tr::kVec; ++i) out.x[i] = from_float<Out>(to_float(in.x[i]));
      return out;
    }
  }
  static __device__ void store(const Params& p, int64_t at, const Run& run) {
    *reinterpret_cast<Run*>(static_cast<Out*>(p.to.data) + at) = run;
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
__device__ Place find_tile(const Params& p, Int index, int rows) {
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
  at.row = static_cast<int64_t>(tile / columns) * rows;
  at.column = static_cast<int64_t>(tile % columns) * kColumns;
  return at;
}

// Columns of 64 numbers and one more, so that neither side meets a bank more than twice.
using Turned = uint32_t[kColumns][kColumns + 1];

template <class Tr>
__device__ void move_tile(const Params& p, const Place& at, Turned& turned) {
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
    const auto bits = [](auto x) -> uint32_t {
      if constexpr (sizeof(x) == 2) {
        return *reinterpret_cast<const uint16_t*>(&x);
      } else {
        return *reinterpret_cast<const uint32_t*>(&x);
      }
    };
    __syncthreads();  // the tile before has been read by all threads
#pragma unroll
    for (int i = 0; i < T::kRuns; ++i) {
#pragma unroll
      for (int j = 0; j < Tr::kVec; ++j) {
        turned[lane * Tr::kVec + j][first + i * T::kStep] = bits(run[i].x[j]);
      }
    }
    __syncthreads();  // the tile is there, for all threads
    const int64_t out_column = at.row + lane * Tr::kVec;
#pragma unroll
    for (int i = 0; i < T::kRuns; ++i) {
      const int c = first + i * T::kStep;
      const int64_t out_row = at.column + c;
      if (out_row >= p.columns || out_column >= p.rows) continue;
      typename N::Run out;
      using E = std::remove_cvref_t<decltype(out.x[0])>;
#pragma unroll
      for (int j = 0; j < Tr::kVec; ++j) {
        const uint32_t w = turned[c][lane * Tr::kVec + j];
        if constexpr (sizeof(E) == 2) {
          const auto narrow = static_cast<uint16_t>(w);
          out.x[j] = *reinterpret_cast<const E*>(&narrow);
        } else {
          out.x[j] = *reinterpret_cast<const E*>(&w);
        }
      }
      N::store(p, at.to + out_row * p.to_row + out_column, out);
    }
  }
}

// Numbers of any type, one by one, need more registers than six CTAs leave.
template <class Tr>
__global__ void __launch_bounds__(kThreads, std::is_void_v<typename Tr::In> ? 4 : 6)
    move_kernel(const __grid_constant__ Params p) {
  __shared__ Turned turned;
  if (p.record != nullptr && *p.record != ~0ull) return;
  const bool is_small = p.num_tiles <= INT32_MAX;  // divisions of 32 bits
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < p.num_tiles; i += gridDim.x) {
    const Place at = is_small ? find_tile<uint32_t>(p, static_cast<uint32_t>(i), Tile<Tr>::kRows)
                              : find_tile<int64_t>(p, i, Tile<Tr>::kRows);
    if (!at.is_none) move_tile<Tr>(p, at, turned);  // the same for all threads
  }
}

}  // namespace deltic::gpu::move
