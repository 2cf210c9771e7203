// Tokens' betas and decays, summed up in one order wherever they are needed: blocks of sixteen
// tokens, and what lies before a block added last.
#pragma once

#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tiles.cuh"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/norms.cuh"

namespace deltic::gpu::gradient {

template <class E>
__device__ uint4 pack_operands(const float (&x)[8]) {
  return {pack<E>(x[0], x[1]), pack<E>(x[2], x[3]), pack<E>(x[4], x[5]), pack<E>(x[6], x[7])};
}

// A head's number of row r of a chunk, as the call has it; 0 past its tokens and if x is absent.
__device__ inline float raw_of(const Rows& x, const TokenTile& tile, int64_t head, int r) {
  if (!x.present || r >= tile.length) return 0.0f;
  return load(x.data, x.dtype, offset(x, tile.batch, tile.begin + r, head));
}
// From it; 1 past the tokens.
__device__ inline float beta_of(const Params& p, const TokenTile& tile, float raw, int r) {
  if (p.beta_kind == BetaKind::none || r >= tile.length) return 1.0f;
  const float x = beta_value(p.beta_form, raw);
  return fabsf(x) < kLeastBeta ? kLeastBeta : x;
}

// The log decay of row r; 0 past the tokens and without gates.
__device__ inline float head_decay(const Params& p, const TokenTile& tile, int64_t head, float g,
                                   int r) {
  if (p.gate == Gate::none || r >= tile.length) return 0.0f;
  const float rate = p.A_log.present ? gate_rate(load_param(p.A_log, head)) : 1.0f;
  const float bias = p.dt_bias.present ? load_param(p.dt_bias, head) : 0.0f;
  return clamp_log_decay(log_decay(p.gate_form, p.lower_bound, g, rate, bias));
}
// G of row r: 64 numbers in shared memory, read by all lanes at once.
__device__ inline float head_sum(const float* log_decay, int r) {
  float before = 0, sum = 0;
  for (int i = 0; i < kChunk; ++i) {
    if (i % 16 == 0) before += sum, sum = 0;
    if (i <= r) sum += log_decay[i];
  }
  return before + sum;
}

// Raw gates of two bytes from shared memory: number i is place(i) bytes behind `from`.
template <int N, class F>
__device__ void raw_of_tile(const Params& p, const unsigned char* from, F&& place, float (&g)[N]) {
  const auto each = [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = to_float(*reinterpret_cast<const T*>(from + place(i)));
  };
  p.g.dtype == DType::bf16 ? each(static_cast<__nv_bfloat16*>(nullptr))
                           : each(static_cast<__half*>(nullptr));
}

template <int N, class F>
__device__ void raw_of_floats(const unsigned char* from, F&& place, float (&g)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = *reinterpret_cast<const float*>(from + place(i));
}

// One channel's gates.
struct ChannelGate {
  float rate, bias;
  // Before anything is in registers: the place of a parameter may take calls to divide.
  __device__ ChannelGate(const Params& p, int64_t head, int d)
      : rate(p.A_log.present ? gate_rate(load_param(p.A_log, head)) : 1.0f),
        bias(p.dt_bias.present ? load_param(p.dt_bias, head * p.gate_width + d) : 0.0f) {}

  // Raw gates of rows [first, first + N), all under way at once; 0 past the tokens.
  template <int N>
  static __device__ void raw(const Params& p, const TokenTile& tile, int64_t head, int d, int first,
                             float (&g)[N]) {
    with_dtype(p.g.dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      const T* at = static_cast<const T*>(p.g.data) +
                    offset(p.g, tile.batch, tile.begin + min(first, tile.length - 1), head) + d;
      const int64_t step = p.g.st;
      if (tile.length == kChunk) {  // no comparisons
#pragma unroll
        for (int i = 0; i < N; ++i, at += step) g[i] = to_float(*at);
        return;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float x = to_float(*at);
        g[i] = first + i < tile.length ? x : 0.0f;
        if (first + i + 1 < tile.length) at += step;  // else the last one again
      }
    });
  }
  // The gradients of raw gates of rows [first, first + 16) of the chunk's.
  static __device__ void store_raw(const Params& p, const TokenTile& tile, int64_t head, int d,
                                   int first, const float (&dg)[16]) {
    with_dtype(p.dg.dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      T* at = static_cast<T*>(p.dg.data) + offset(p.dg, tile.batch, tile.begin + first, head) + d;
      const int64_t step = p.dg.st;
      if (tile.length == kChunk) {  // no comparisons
#pragma unroll
        for (int i = 0; i < 16; ++i, at += step) *at = from_float<T>(dg[i]);
        return;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i, at += step) {
        if (first + i < tile.length) *at = from_float<T>(dg[i]);
      }
    });
  }
  // `before` plus the sums of log decays of raw gates, of rows from `first` on, to places `pitch`
  // apart, which are the thread's alone; returns the last sum. Forms with exponentials are a loop:
  // as straight code those of sixteen gates fill the instruction cache.
  __device__ float sums(const Params& p, const TokenTile& tile, const float* g, int first,
                        float before, float* G, int pitch) const {
    float sum = 0;
    if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sum += clamp_log_decay(g[i]);
        G[i * pitch] = before + sum;
      }
      return sum;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) G[i * pitch] = g[i];
#pragma unroll 1
    for (int i = 0; i < 16; ++i, G += pitch) {
      if (first + i < tile.length) {
        sum += clamp_log_decay(log_decay(p.gate_form, p.lower_bound, *G, rate, bias));
      }
      *G = before + sum;
    }
    return sum;
  }
};

}  // namespace deltic::gpu::gradient
