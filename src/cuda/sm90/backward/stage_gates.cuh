// dg of a chunk from its dG, through the gate's form, and the chunk's sums of parameters.
//
// dg_t is the sum of dG over tokens from t on. What exp(G_last - G_i) gives belongs to the tokens
// after i: it is in dG with a minus, and the sum of all of it is added to every token.
#pragma once

#include "cuda/sm90/backward/stage_pairs.cuh"
#include "cuda/tile/gate_gradients.cuh"

namespace deltic::gpu::gradient {

// The gradient of the raw gate and of the parameters; nothing passes a log decay that was clamped.
__device__ inline GateGradient raw_gradient(const Params& p, float g, float rate, float bias,
                                            float dy) {
  const bool is_clamped = log_decay(p.gate_form, p.lower_bound, g, rate, bias) < kMinLogDecay;
  return log_decay_gradient(p.gate_form, p.lower_bound, g, rate, bias, is_clamped ? 0.0f : dy);
}

// Sums over values of S dS of one channel, times exp(G_last).
template <class Tr>
__device__ float last_term(const GradientShared<Tr>& s, int d, float last) {
  float x = 0;
#pragma unroll
  for (int i = 0; i < Tr::kParts; ++i) x += s.last_parts[i][d];
  return decay_between(last) * x;
}

// Per channel. Sums in the exchange are visible; barriers inside.
template <class Tr>
__device__ void store_channel_gates(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                                    int64_t head, int64_t item) {
  const int d = thread_index() % Tr::K, b = thread_index() / Tr::K;
  const bool has = b < 4 && (p.dg.present || p.wants_sums);
  float after = 0;
  if (has) {
    float sum = 0;
#pragma unroll
    for (int i = 15; i >= 0; --i) sum += s.x.sum.dG[16 * b + i][d];
    s.sum_parts[b][d] = sum;
    after = last_term<Tr>(s, d, s.G[kChunk - 1][d]);
  }
  __syncthreads();  // sums of the blocks; G of other blocks has been read
  float A_log = 0;
  if (has) {
#pragma unroll
    for (int i = 0; i < 4; ++i) after += s.end_parts[i][d];
#pragma unroll
    for (int i = 3; i >= 0; --i) after += i > b ? s.sum_parts[i][d] : 0.0f;
    float dg[16], bias = 0;
    if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
      // A log decay that was clamped, or is so deep that nothing passes, by its difference of G.
      constexpr float kNothing = kMinLogDecay + 1;
      float G = s.G[16 * b + 15][d];
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        after += s.x.sum.dG[16 * b + i][d];
        const float before = i > 0 ? s.G[16 * b + i - 1][d] : b > 0 ? s.G[16 * b - 1][d] : 0.0f;
        dg[i] = G - before < kNothing ? 0.0f : after;
        bias += 16 * b + i < tile.length ? dg[i] : 0.0f;
        G = before;
      }
    } else {
      const ChannelGate gate(p, head, d);
      // Raw gates in the place of G and gradients in that of dG, for a loop over the forms' code.
      float g[16];
      ChannelGate::raw(p, tile, head, d, 16 * b, g);
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        after += s.x.sum.dG[16 * b + i][d];
        s.x.sum.dG[16 * b + i][d] = after, s.G[16 * b + i][d] = g[i];
      }
#pragma unroll 1
      for (int r = 16 * b; r < min(16 * b + 16, tile.length); ++r) {
        const GateGradient x = raw_gradient(p, s.G[r][d], gate.rate, gate.bias, s.x.sum.dG[r][d]);
        A_log += x.A_log, bias += x.g;
        s.x.sum.dG[r][d] = x.g;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) dg[i] = s.x.sum.dG[16 * b + i][d];
    }
    if (p.dg.present) ChannelGate::store_raw(p, tile, head, d, 16 * b, dg);
    s.bias_parts[b][d] = bias;
  }
  if (!p.wants_sums) return;
  A_log = warp_sum(A_log);
  if (thread_index() % 32 == 0) s.A_parts[thread_index() / 32] = A_log;
  __syncthreads();  // sums of parameters
  float* to = p.work.sums + item * (1 + Tr::K);
  if (b == 0)
    to[1 + d] =
        (s.bias_parts[0][d] + s.bias_parts[1][d]) + (s.bias_parts[2][d] + s.bias_parts[3][d]);
  if (thread_index() == 0) {
    float sum = 0;
    for (int w = 0; w < Tr::kWarps; ++w) sum += s.A_parts[w];
    to[0] = sum;
  }
}

// One gate per head. All parts are visible; barriers inside.
template <class Tr>
__device__ void store_head_gates(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                                 int64_t head, int64_t item) {
  if (p.gate == Gate::none || !(p.dg.present || p.wants_sums)) return;
  const int thread = thread_index();
  const auto add = [](const auto& parts, int i) {
    return (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
  };
  float* dG = s.bias_parts[0];  // [64], and what belongs to later tokens behind it
  static_assert(sizeof(s.bias_parts) >= 2 * kChunk * sizeof(float));
  if (thread < kChunk) {
    dG[thread] = add(s.sum_parts, thread) + add(s.pair_rows, thread) - add(s.pair_columns, thread);
  } else if (thread < 2 * kChunk) {
    dG[thread] = add(s.end_parts, thread - kChunk);
  }
  if (thread >= 32 * (Tr::kWarps - 1)) {  // the last warp: S dS over channels
    float x = 0;
#pragma unroll
    for (int d = thread % 32; d < Tr::K; d += 32) {
      x += last_term<Tr>(s, d, s.rows_of(kSum)[kChunk - 1]);
    }
    x = warp_sum(x);
    if (thread % 32 == 0) s.total = x;
  }
  __syncthreads();  // dG
  // Eight neighbours have a token, each a part of the sum.
  constexpr int kLanes = Tr::kThreads / kChunk;
  const int t = thread / kLanes, part = thread % kLanes;
  float dy = 0;
#pragma unroll
  for (int n = 0; n < kChunk / kLanes; ++n) {
    const int i = n * kLanes + part;
    dy += i < t ? dG[kChunk + i] : dG[i];
  }
#pragma unroll
  for (int m = 1; m < kLanes; m *= 2) dy += __shfl_xor_sync(0xFFFFFFFFu, dy, m);
  float A_log = 0, bias = 0;
  if (t < tile.length && part == 0) {
    const float rate = p.A_log.present ? gate_rate(load_param(p.A_log, head)) : 1.0f;
    const float b = p.dt_bias.present ? load_param(p.dt_bias, head) : 0.0f;
    const GateGradient x = raw_gradient(p, s.rows_of(kRawGate)[t], rate, b, s.total + dy);
    A_log = x.A_log, bias = x.g;
    if (p.dg.present) {
      store(p.dg.data, p.dg.dtype, offset(p.dg, tile.batch, tile.begin + t, head), x.g);
    }
  }
  if (!p.wants_sums) return;
  A_log = warp_sum(A_log), bias = warp_sum(bias);
  float(&parts)[2][Tr::kWarps] = reinterpret_cast<float(&)[2][Tr::kWarps]>(s.pair_rows);
  if (thread % 32 == 0) parts[0][thread / 32] = A_log, parts[1][thread / 32] = bias;
  __syncthreads();  // sums of the warps
  if (thread < 2) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) sum += parts[thread][w];
    p.work.sums[item * 2 + thread] = sum;
  }
}

}  // namespace deltic::gpu::gradient
