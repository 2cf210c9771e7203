// dg of a chunk from its dG, through the gate's form, and the chunk's sums of parameters.
//
// dg_t is the sum of dG over tokens from t on. What exp(G_last - G_i) gives belongs to the tokens
// after i: it is in dG with a minus, and the sum of all of it is added to every token.
#pragma once

#include "cuda/ptx/vectors.cuh"
#include "cuda/sm90/backward/stage_pairs.cuh"
#include "cuda/tile/gate_gradients.cuh"

namespace deltic::gpu::gradient {

// Per head: the gradient of the raw gate and of the parameters; nothing passes a log decay that was
// clamped.
__device__ inline GateGradient raw_gradient(const Params& p, float g, float rate, float bias,
                                            float dy) {
  const bool is_clamped = log_decay(p.gate_form, p.lower_bound, g, rate, bias) < kMinLogDecay;
  return log_decay_gradient(p.gate_form, p.lower_bound, g, rate, bias, is_clamped ? 0.0f : dy);
}

// Two neighbouring numbers in shared memory.
__device__ inline float2& pair_of(float* x) { return *reinterpret_cast<float2*>(x); }
__device__ inline const float2& pair_of(const float* x) {
  return *reinterpret_cast<const float2*>(x);
}
__device__ inline float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

// Sums over values of S dS of one channel, times exp(G_last).
template <class Tr>
__device__ float last_term(const GradientShared<Tr>& s, int d, float last) {
  float x = 0;
#pragma unroll
  for (int i = 0; i < Tr::kParts; ++i) x += s.last_parts[i][d];
  return decay_between(last) * x;
}

// Sums over values of S dS of a pair of channels, times exp(G_last).
template <class Tr>
__device__ float2 last_terms(const GradientShared<Tr>& s, int d) {
  float2 x = {0, 0};
#pragma unroll
  for (int i = 0; i < Tr::kParts; ++i) x = x + pair_of(&s.last_parts[i][d]);
  const float2 last = pair_of(&s.G[kChunk - 1][d]);
  return {decay_between(last.x) * x.x, decay_between(last.y) * x.y};
}

// The gradients of raw gates of two channels, of `count` tokens from element `at` on.
__device__ inline void store_gates(const Params& p, int64_t at, int count,
                                   const float (&dg)[kRun][2]) {
  with_dtype(p.dg.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* to = static_cast<T*>(p.dg.data) + at;
    const int64_t step = p.dg.st;
    if (p.dg_pairs) {
#pragma unroll
      for (int i = 0; i < kRun; ++i, to += step) {
        if (i >= count) continue;
        if constexpr (sizeof(T) == 4) {
          store_vector(to, __float_as_uint(dg[i][0]), __float_as_uint(dg[i][1]));
        } else {
          *reinterpret_cast<uint32_t*>(to) = pack_result<T>(dg[i][0], dg[i][1]);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i, to += step) {
      if (i < count) to[0] = from_float<T>(dg[i][0]), to[1] = from_float<T>(dg[i][1]);
    }
  });
}

// Per channel. g: raw gates, where the form is not a log decay. Sums in the exchange are visible;
// barriers inside.
template <class Tr>
__device__ void store_channel_gates(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                                    int64_t head, int64_t item, float (&g)[kRun][2]) {
  if (!(p.dg.present || p.wants_sums)) return;
  const GatePlace<Tr> at;
  const int d = at.channel;
  float2 after = {0, 0}, bias = {0, 0};
  float rate = 1, dg[kRun][2] = {};  // first dG, then sums of it, then dg
  if (at.is_there()) {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      const float2 x = pair_of(&s.x.sum.dG[at.first + i][d]);
      dg[i][0] = x.x, dg[i][1] = x.y, sum = sum + x;
    }
    pair_of(&s.sum_parts[at.run][d]) = sum;
    after = last_terms<Tr>(s, d);
#pragma unroll
    for (int i = 0; i < 4; ++i) after = after + pair_of(&s.end_parts[i][d]);
    bias = pair_of(&s.gate_bias[d]), rate = s.gate_rate;
  }
  __syncthreads();  // sums of the runs; sums over values have been read
  float A_log = 0;
  if (at.is_there()) {
#pragma unroll
    for (int i = kRuns - 1; i > 0; --i) {
      if (i > at.run) after = after + pair_of(&s.sum_parts[i][d]);
    }
    const int count = tile.length - at.first;
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      after.x += dg[i][0], after.y += dg[i][1];
      dg[i][0] = after.x, dg[i][1] = after.y;
    }
    if (count < kRun) {  // nothing of what is no token
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (i >= count) dg[i][0] = dg[i][1] = 0.0f;
      }
    }
    if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
      // A log decay that was clamped, or is so deep that nothing passes, by its difference of G.
      constexpr float kNothing = kMinLogDecay + 1;
      float2 before = at.run > 0 ? pair_of(&s.G[at.first - 1][d]) : float2{0, 0};
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const float2 G = pair_of(&s.G[at.first + i][d]);
        if (G.x - before.x < kNothing) dg[i][0] = 0.0f;
        if (G.y - before.y < kNothing) dg[i][1] = 0.0f;
        before = G;
      }
    } else {
      unpack_gates(p, g);
      with_form(p.gate_form, [&](auto kForm) {
        const GateForm<kForm> form(rate, p.lower_bound);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const GateGradient x = form.gradient(g[i][0] + bias.x, dg[i][0]);
          const GateGradient y = form.gradient(g[i][1] + bias.y, dg[i][1]);
          dg[i][0] = x.g, dg[i][1] = y.g, A_log += x.A_log, A_log += y.A_log;
        }
      });
    }
    if (p.dg.present) {
      store_gates(p, offset(p.dg, tile.batch, tile.begin + at.first, head) + d, count, dg);
    }
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < kRun; ++i) sum.x += dg[i][0], sum.y += dg[i][1];
    static_assert(Tr::kParts == kRuns);
    pair_of(&s.last_parts[at.run][d]) = sum;
  }
  if (!p.wants_sums) return;
  A_log = warp_sum(A_log);
  if (thread_index() % 32 == 0) s.A_parts[thread_index() / 32] = A_log;
  __syncthreads();  // sums of parameters
  float* to = p.work.sums + item * (1 + Tr::K);
  if (const int i = thread_index(); i < Tr::K) {
    const float(&x)[kRuns][Tr::K] = s.last_parts;
    to[1 + i] =
        ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + ((x[4][i] + x[5][i]) + (x[6][i] + x[7][i]));
  }
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
  float* dG = s.head_dG;
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
