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

// Two channels of a thread's run of tokens, to rows of a tile in shared memory.
template <class Tr>
__device__ void put_run(float* to, const float (&x)[kRun][2]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) pair_of(to + i * Tr::kPitch) = {x[i][0], x[i][1]};
}

// The gradients of raw gates of two channels, of `count` tokens from element `at` on; `from` in
// rows of shared memory.
template <class Tr>
__device__ void store_gates(const Params& p, int64_t at, int count, const float* from) {
  with_dtype(p.dg.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* to = static_cast<T*>(p.dg.data) + at;
    const int64_t step = p.dg.st;
    if (p.dg_pairs) {
#pragma unroll 4
      for (int i = 0; i < kRun; ++i, to += step) {
        const float2 dg = pair_of(from + i * Tr::kPitch);
        if (i >= count) continue;
        if constexpr (sizeof(T) == 4) {
          store_vector(to, __float_as_uint(dg.x), __float_as_uint(dg.y));
        } else {
          *reinterpret_cast<uint32_t*>(to) = pack_result<T>(dg.x, dg.y);
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kRun; ++i, to += step) {
      const float2 dg = pair_of(from + i * Tr::kPitch);
      if (i < count) to[0] = from_float<T>(dg.x), to[1] = from_float<T>(dg.y);
    }
  });
}

// dg of a thread's run from dG summed up to its end, in place, and its sum; A_log's is returned.
// raw: raw gates, in rows; G of the run, where the form is a log decay. A loop, as in sum_gates.
template <class Tr>
__device__ float gate_gradients(const Params& p, const GradientShared<Tr>& s,
                                const GatePlace<Tr>& at, int count, float* dG, const float* raw,
                                float2& sum) {
  float A_log = 0;
  sum = {0, 0};
  const auto walk = [&](auto&& gradient_of) {
#pragma unroll 2
    for (int i = 0; i < kRun; ++i, dG += Tr::kPitch, raw += Tr::kPitch) {
      float2 dg = i < count ? pair_of(dG) : float2{0, 0};  // nothing of what is no token
      dg = gradient_of(pair_of(raw), dg);
      pair_of(dG) = dg, sum = sum + dg;
    }
  };
  if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
    // A log decay that was clamped, or is so deep that nothing passes, by its difference of G.
    constexpr float kNothing = kMinLogDecay + 1;
    float2 before = at.run > 0 ? pair_of(raw - Tr::kPitch) : float2{0, 0};
    walk([&](float2 G, float2 dg) {
      if (G.x - before.x < kNothing) dg.x = 0.0f;
      if (G.y - before.y < kNothing) dg.y = 0.0f;
      before = G;
      return dg;
    });
  } else {
    const float2 bias = pair_of(&s.gate_bias[at.channel]);
    with_form(p.gate_form, [&](auto kForm) {
      const ApproxGate<kForm> form(s.gate_rate, p.lower_bound);
      walk([&](float2 g, float2 dg) {
        const GateGradient x = form.gradient(g.x + bias.x, dg.x);
        const GateGradient y = form.gradient(g.y + bias.y, dg.y);
        A_log += x.A_log, A_log += y.A_log;
        return float2{x.g, y.g};
      });
    });
  }
  return A_log;
}

// Per channel. g: raw gates, where the form is not a log decay. Sums in the exchange are visible;
// barriers inside.
template <class Tr>
__device__ void store_channel_gates(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                                    int64_t head, int64_t item, float (&g)[kRun][2]) {
  if (!(p.dg.present || p.wants_sums)) return;
  const GatePlace<Tr> at;
  const int d = at.channel;
  float* const dG = &s.x.sum.dG[at.first][d];
  float* const G = &s.G[at.first][d];
  float2 after = {0, 0};
  if (at.is_there()) {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) sum = sum + pair_of(dG + i * Tr::kPitch);
    pair_of(&s.sum_parts[at.run][d]) = sum;
    after = last_terms<Tr>(s, d);
#pragma unroll
    for (int i = 0; i < 4; ++i) after = after + pair_of(&s.end_parts[i][d]);
  }
  __syncthreads();  // sums of the runs; sums over values, and the last G, have been read
  float A_log = 0;
  if (at.is_there()) {
#pragma unroll
    for (int i = kRuns - 1; i > 0; --i) {
      if (i > at.run) after = after + pair_of(&s.sum_parts[i][d]);
    }
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      float2& x = pair_of(dG + i * Tr::kPitch);
      after = after + x, x = after;
    }
    if (p.gate_form != DELTIC_GATE_LOG_DECAY) {  // in the place of G, which no one reads again
      unpack_gates(p, g);
      put_run<Tr>(G, g);
    }
    const int count = tile.length - at.first;
    float2 sum;
    A_log = gate_gradients<Tr>(p, s, at, count, dG, G, sum);
    if (p.dg.present) {
      store_gates<Tr>(p, offset(p.dg, tile.batch, tile.begin + at.first, head) + d, count, dG);
    }
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
