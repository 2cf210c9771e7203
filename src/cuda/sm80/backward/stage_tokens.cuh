// Sixteen tokens of a head into shared memory: norms, decays, their products along the chunk, and
// the scores. Called by all threads.
#pragma once

#include "cuda/sm80/backward/smem.h"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/norms.cuh"

namespace deltic::gpu::backward {

// The head's parameters; a barrier must follow.
template <class Tr>
__device__ void load_parameters(const Params& p, Shared<Tr>& s) {
  const int64_t head = s.item.head;
  const int d = static_cast<int>(threadIdx.x);
  if (d == 0) s.rate = p.A_log.present ? gate_rate(load_param(p.A_log, head)) : 1.0f;
  if (d < Tr::kWidth) {
    const bool has = p.dt_bias.present && d < p.gate_width;
    s.bias[d] = has ? load_param(p.dt_bias, head * p.gate_width + d) : 0.0f;
  }
}

// Tokens [first, first + count) of the T dimension: k, q where asked for, decays. Rows from `count`
// on are zeros with a decay of 1. Warp w has tokens w and w + 8. A barrier must follow.
template <class Tr>
__device__ void load_tokens(const Params& p, int64_t first, int count, bool has_q, Shared<Tr>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = s.span.batch, h = s.item.head, hk = s.item.head / p.group;
#pragma unroll
  for (int i = warp; i < kChunk; i += kWarps) {
    const bool is_token = i < count;
    const int64_t t = first + i;
    float k[Tr::kLanes] = {}, q[Tr::kLanes] = {}, g[Tr::kLanes] = {};
    if (is_token) {
      load_lanes(p.k.data, p.k.dtype, offset(p.k, b, t, hk), lane, p.K, k);
      if (has_q) load_lanes(p.q.data, p.q.dtype, offset(p.q, b, t, hk), lane, p.K, q);
      if (p.gate == Gate::channel) {
        load_lanes(p.g.data, p.g.dtype, offset(p.g, b, t, h), lane, p.K, g);
      } else if (p.gate == Gate::head) {
        g[0] = load(p.g.data, p.g.dtype, offset(p.g, b, t, h));
      }
    }
    float rk = 1, rq = 1;
    if (p.l2norm) reciprocal_norms(k, q, rk, rq);
    const bool per_channel = p.gate == Gate::channel;
    float common = 1;
    if (is_token && p.gate == Gate::head) {
      common = decay_of(log_decay(p.gate_form, p.lower_bound, g[0], s.rate, s.bias[0]));
    }
#pragma unroll
    for (int n = 0; n < Tr::kLanes; ++n) {
      const int d = lane + 32 * n;
      s.k[i][d] = k[n] * rk;
      s.q[i][d] = q[n] * rq;
      float decay = common;
      if (per_channel && is_token && d < p.K) {
        decay = decay_of(log_decay(p.gate_form, p.lower_bound, g[n], s.rate, s.bias[d]));
      }
      s.decay[i][d] = decay;
    }
  }
}

// Products of decays from the chunk's start and to its end. All are products of consecutive decays:
// at most 1, and exact where decays are 0. A barrier before (the tokens) and after.
template <class Tr>
__device__ void lay_factors(const Params& p, Shared<Tr>& s) {
  const int d = static_cast<int>(threadIdx.x);
  if (d >= Tr::kWidth) return;
  float from_start = 1, to_end = 1;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    from_start *= s.decay[i][d];
    s.kE[d][i] = s.k[i][d] * from_start;
    s.qE[d][i] = p.scale * s.q[i][d] * from_start;
  }
  s.last[d] = from_start;
#pragma unroll
  for (int i = kChunk - 1; i >= 0; --i) {
    s.kR[d][i] = s.k[i][d] * to_end;
    to_end *= s.decay[i][d];
  }
}

// L_ij = sum_d k_id k_jd D_ijd for j < i and P_ij = scale sum_d q_id k_jd D_ijd for j <= i; zeros
// elsewhere. Sixteen threads have a row i and walk from column i to the left, with the decays
// between the two tokens as a running factor of row i's channels. Barriers as lay_factors.
template <class Tr>
__device__ void lay_scores(const Params& p, Shared<Tr>& s) {
  constexpr int kM = Tr::kWidth / 16;
  const int i = static_cast<int>(threadIdx.x) / 16, lane = threadIdx.x % 16;
  // Two rows of a warp read channels 16 apart: every bank once.
  int d[kM];
  float kw[kM], qw[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    d[m] = lane + 16 * ((m + i % 2) % kM);
    kw[m] = s.k[i][d[m]], qw[m] = p.scale * s.q[i][d[m]];
  }
  const int last = i | 1;  // both rows of a warp take the same number of steps
  for (int step = 0; step <= last; ++step) {
    const int j = i - step;
    float l = 0, c = 0;
    if (j >= 0) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float k = s.k[j][d[m]];
        l += kw[m] * k, c += qw[m] * k;
        const float decay = s.decay[j][d[m]];  // from column j to j - 1
        kw[m] *= decay, qw[m] *= decay;
      }
    }
#pragma unroll
    for (int x = 8; x > 0; x /= 2) {
      l += __shfl_xor_sync(0xFFFFFFFFu, l, x);
      c += __shfl_xor_sync(0xFFFFFFFFu, c, x);
    }
    if (lane == 0 && j >= 0) {
      s.L[i][j] = step > 0 ? l : 0.0f;
      s.P[i][j] = c;
    }
  }
  const int j = lane;  // the upper triangle
  if (j > i) s.L[i][j] = 0, s.P[i][j] = 0;
}

// Numbers of the chunk's tokens to and from shared memory.
__device__ inline void store_tokens(const float (&x)[kChunk], float (&to)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    *reinterpret_cast<float4*>(&to[i]) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }
}
__device__ inline void read_tokens(const float (&from)[kChunk], float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    *reinterpret_cast<float4*>(&x[i]) = *reinterpret_cast<const float4*>(&from[i]);
  }
}

// One number of each of the chunk's tokens for a column: v, d_o, or beta with its form.
template <class F>
__device__ void load_column(const Rows& x, int64_t b, int64_t first, int64_t head, int64_t column,
                            int count, float (&out)[kChunk], F&& form) {
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* at = static_cast<const E*>(x.data) + offset(x, b, first, head) + column;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[i] = i < count ? form(to_float(at[i * x.st])) : 0.0f;
  });
}

// The thread's column of v or d_o: zeros where it has none.
template <class Tr>
__device__ void load_values(const Params& p, const Rows& x, const Shared<Tr>& s, int64_t first,
                            int count, float (&out)[kChunk]) {
  const int64_t column =
      int64_t{s.item.slice} * Tr::kColumns + static_cast<int>(threadIdx.x) % Tr::kColumns;
  const int present = x.present && column < p.V ? count : 0;
  load_column(x, s.span.batch, first, s.item.head, column, present, out,
              [](float value) { return value; });
}

template <class Tr>
__device__ void load_betas(const Params& p, const Shared<Tr>& s, int64_t first, int count,
                           float (&out)[kChunk]) {
  const int64_t column =
      int64_t{s.item.slice} * Tr::kColumns + static_cast<int>(threadIdx.x) % Tr::kColumns;
  if (p.beta_kind == BetaKind::none) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[i] = i < count ? 1.0f : 0.0f;
    return;
  }
  const bool per_column = p.beta_kind == BetaKind::value;
  load_column(p.beta, s.span.batch, first, s.item.head, per_column ? column : 0,
              per_column && column >= p.V ? 0 : count, out,
              [&](float x) { return beta_value(p.beta_form, x); });
}

// The decays of the thread's column, 1 past the tokens; part 0 of the keys leaves them for all. A
// barrier must follow.
template <class Tr>
__device__ void lay_column_decays(const Params& p, int64_t first, int count, Shared<Tr>& s) {
  const int c = static_cast<int>(threadIdx.x);
  if (c >= Tr::kColumns) return;
  const int64_t column = int64_t{s.item.slice} * Tr::kColumns + c;
  float b[kChunk], total = 1;
  const int present = column < p.V ? count : 0;
  load_column(p.gv, s.span.batch, first, s.item.head, column, present, b,
              [](float x) { return decay_of(x); });
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= present) b[i] = 1;
    total *= b[i];
  }
  store_tokens(b, s.gv.b[c]);
  s.gv.total[c] = total;
}

}  // namespace deltic::gpu::backward
