// Tokens' betas and decays; per head summed up in one order wherever they are needed: blocks of
// sixteen tokens, and what lies before a block added last.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tiles.cuh"
#include "cuda/tile/gate_approx.cuh"
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

// Element i of a parameter of a gate. As load_param, by divisions of 32 bits (checked_ctas: there
// are not so many): those of 64 are calls, and a page of code each.
__device__ inline float gate_param(const Param& x, unsigned i) {
  int64_t at = x.contiguous ? i : 0;
  if (!x.contiguous) {
#pragma unroll 1
    for (int32_t d = x.rank - 1; d >= 0; --d) {
      const auto n = static_cast<unsigned>(x.shape[d]);
      at += i % n * x.strides[d];
      i /= n;
    }
  }
  return load(x.data, x.dtype, at);
}

// Parameters of two neighbouring channels' gates. A_log as it is: whoever loads it ahead should not
// wait for it.
struct ChannelGates {
  float A_log = 0, bias[2] = {};
  ChannelGates() = default;
  __device__ ChannelGates(const Params& p, int64_t head, int d) {
    if (p.A_log.present) A_log = gate_param(p.A_log, static_cast<unsigned>(head));
    if (!p.dt_bias.present) return;
    const unsigned i = static_cast<unsigned>(head) * p.gate_width + d;
    bias[0] = gate_param(p.dt_bias, i), bias[1] = gate_param(p.dt_bias, i + 1);
  }
  __device__ float rate() const { return gate_rate(A_log); }  // 1 without A_log
};

// Raw gates of two channels of `count` tokens from element `at` on, all under way at once; zeros
// behind them. Those of two bytes are a word until unpack_gates.
template <int N>
__device__ void load_gates(const Params& p, int64_t at, int count, float (&g)[N][2]) {
  const auto walk = [&](const auto* from, auto&& use) {
#pragma unroll
    for (int t = 0; t < N; ++t) {
      g[t][0] = g[t][1] = 0.0f;
      if (t < count) use(t, from);
      from += p.g.st;
      keep_here(from);  // it walks: sixteen pointers would spill
    }
  };
  if (p.g_bytes == 4) {
    walk(static_cast<const float*>(p.g.data) + at, [&](int t, const float* from) {
      const float2 x = *reinterpret_cast<const float2*>(from);
      g[t][0] = x.x, g[t][1] = x.y;
    });
  } else if (p.g_bytes == 2) {
    walk(static_cast<const uint16_t*>(p.g.data) + at, [&](int t, const uint16_t* from) {
      g[t][0] = __uint_as_float(*reinterpret_cast<const uint32_t*>(from));
    });
  } else {
    with_dtype(p.g.dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      walk(static_cast<const T*>(p.g.data) + at,
           [&](int t, const T* from) { g[t][0] = to_float(from[0]), g[t][1] = to_float(from[1]); });
    });
  }
}
template <int N>
__device__ void unpack_gates(const Params& p, float (&g)[N][2]) {
  if (p.g_bytes != 2) return;
  const auto each = [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      const float2 x = unpack<T>(__float_as_uint(g[t][0]));
      g[t][0] = x.x, g[t][1] = x.y;
    }
  };
  p.g.dtype == DType::bf16 ? each(static_cast<__nv_bfloat16*>(nullptr))
                           : each(static_cast<__half*>(nullptr));
}

}  // namespace deltic::gpu::gradient
