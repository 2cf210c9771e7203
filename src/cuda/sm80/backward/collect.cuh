// What a segment left in scratch, added up over slices and groups in a fixed order: through the
// norm, the gate and the beta forms, and out. Sums of parameters over tokens are in fp64.
#pragma once

#include "cuda/sm80/backward/params.h"
#include "cuda/sm80/backward/traits.h"
#include "cuda/tile/gate_gradients.cuh"
#include "cuda/tile/norms.cuh"
#include "cuda/tile/search.cuh"

namespace deltic::gpu::backward {

// The token of a row of scratch; none where the segment's tokens have ended.
struct RowToken {
  int64_t batch, token;
  bool is_there;
};
__device__ inline RowToken token_of(const Params& p, int64_t row, int64_t m) {
  const Tokens& x = p.tokens;
  if (p.compact) {
    const Span span = span_of(x, row / p.segment);
    const int64_t t = m * p.segment + row % p.segment;
    return {span.batch, span.begin + t, t < span.length};
  }
  if (!x.packed) {
    const int64_t t = row % x.T;
    return {row / x.T, t, t / p.segment == m};
  }
  // The last sequence that begins at the row's token or before, and is not empty.
  const int64_t n = last_begun(x.N, [&](int64_t i) { return load_index(x.cu, i) <= row; });
  const Span span = span_of(x, n);
  const int64_t t = row - span.begin;
  return {0, row, t >= 0 && t < span.length && t / p.segment == m};
}

// Calls f(row, token) for the warp's rows.
template <class F>
__device__ void for_rows(const Params& p, int64_t m, F&& f) {
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < p.rows; row += step) {
    const RowToken at = token_of(p, row, m);
    if (at.is_there) f(row, at);
  }
}

// Lane's channels of a row, summed over slices: `head` is a value head.
template <int N>
__device__ void add_slices(const Params& p, const float* from, int64_t row, uint32_t head,
                           int width, float (&sum)[N]) {
  const int lane = threadIdx.x % 32;
  for (uint32_t slice = 0; slice < p.num_slices; ++slice) {
    const float* at = from + ((row * p.HV + head) * p.num_slices + slice) * width;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int d = lane + 32 * i;
      if (d < width) sum[i] += at[d];
    }
  }
}

// dq or dk of a token and q/k head: x is q or k.
template <int N>
__device__ void store_key_rows(const Params& p, const Rows& x, const Rows& dx, const float* from,
                               int64_t row, const RowToken& at, uint32_t key_head) {
  if (!dx.present) return;
  const int lane = threadIdx.x % 32;
  float sum[N] = {};
  for (uint32_t i = 0; i < p.group; ++i) {
    add_slices(p, from, row, key_head * p.group + i, p.K, sum);
  }
  if (p.l2norm) {
    float y[N], r, unused;
    load_lanes(x.data, x.dtype, offset(x, at.batch, at.token, key_head), lane, p.K, y);
    reciprocal_norms(y, y, r, unused);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= r;
    normalize_gradient(y, r, sum);
  }
  const int64_t to = offset(dx, at.batch, at.token, key_head);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = lane + 32 * i;
    if (d < p.K) store(dx.data, dx.dtype, to + d, sum[i]);
  }
}

// dg of a token and value head, down to the raw gate; adds to the sums of parameters.
template <int N>
__device__ void store_gate_row(const Params& p, int64_t row, const RowToken& at, uint32_t head,
                               float rate, double& A_log, double (&bias)[N]) {
  const int lane = threadIdx.x % 32;
  float dy[N] = {}, g[N];
  add_slices(p, p.scratch.dg, row, head, p.gate_width, dy);
  load_lanes(p.g.data, p.g.dtype, offset(p.g, at.batch, at.token, head), lane, p.gate_width, g);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = lane + 32 * i;
    if (d >= p.gate_width) break;
    const float b =
        p.dt_bias.present ? load_param(p.dt_bias, int64_t{head} * p.gate_width + d) : 0.0f;
    const GateGradient gradient =
        log_decay_gradient(p.gate_form, p.lower_bound, g[i], rate, b, dy[i]);
    A_log += gradient.A_log;
    bias[i] += gradient.g;
    if (p.dg.present) {
      store(p.dg.data, p.dg.dtype, offset(p.dg, at.batch, at.token, head) + d, gradient.g);
    }
  }
}

// The warps' sums of a head, in order, onto the CTA's own.
template <int N>
__device__ void add_sums(const Params& p, uint32_t head, double A_log, const double (&bias)[N]) {
  __shared__ double warps[kWarps][32 * N + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 16; m > 0; m /= 2) A_log += __shfl_xor_sync(0xFFFFFFFFu, A_log, m);
  if (lane == 0) warps[warp][0] = A_log;
#pragma unroll
  for (int i = 0; i < N; ++i) warps[warp][1 + lane + 32 * i] = bias[i];
  __syncthreads();  // all warps' sums
  double* to = p.scratch.sums + (int64_t{blockIdx.x} * p.HV + head) * (1 + p.gate_width);
  for (int i = static_cast<int>(threadIdx.x); i <= p.gate_width; i += kThreads) {
    for (int w = 0; w < kWarps; ++w) to[i] += warps[w][i];
  }
  __syncthreads();  // they have been read
}

// A CTA has every so many rows of one q/k head and its group. N: channels of a lane.
template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    collect_kernel(const __grid_constant__ Params p, int64_t m) {
  if (is_wrong(p.tokens)) return;
  const uint32_t key_head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  for_rows(p, m, [&](int64_t row, const RowToken& at) {
    store_key_rows<N>(p, p.q, p.dq, p.scratch.dq, row, at, key_head);
    store_key_rows<N>(p, p.k, p.dk, p.scratch.dk, row, at, key_head);
  });
  const bool has_beta = p.dbeta.present && p.beta_kind == BetaKind::head;
  for (uint32_t head = key_head * p.group; has_beta && head < (key_head + 1) * p.group; ++head) {
    for_rows(p, m, [&](int64_t row, const RowToken& at) {
      if (lane != 0) return;
      float sum[1] = {};
      add_slices(p, p.scratch.dbeta, row, head, 1, sum);
      const float x = load(p.beta.data, p.beta.dtype, offset(p.beta, at.batch, at.token, head));
      store(p.dbeta.data, p.dbeta.dtype, offset(p.dbeta, at.batch, at.token, head),
            beta_gradient(p.beta_form, x, sum[0]));
    });
  }
  if (p.gate == Gate::none || !(p.dg.present || p.wants_sums)) return;
  for (uint32_t head = key_head * p.group; head < (key_head + 1) * p.group; ++head) {
    const float rate = p.A_log.present ? gate_rate(load_param(p.A_log, head)) : 1.0f;
    double A_log = 0, bias[N] = {};
    for_rows(p, m, [&](int64_t row, const RowToken& at) {
      store_gate_row<N>(p, row, at, head, rate, A_log, bias);
    });
    if (p.wants_sums) add_sums<N>(p, head, A_log, bias);
  }
}

// dA_log and ddt_bias: the collectors' sums, in order, rounded once. A thread has a parameter.
__device__ inline void store_parameter(const Param& x, int64_t i, double value) {
  store(x.data, x.dtype, param_offset(x, i), static_cast<float>(value));
}
__global__ void __launch_bounds__(kThreads, 1) sums_kernel(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const int64_t width = 1 + p.gate_width;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.HV * width) return;
  const int64_t head = index / width, i = index % width;
  double sum = 0;
  for (unsigned block = 0; block < kCollectors; ++block) {
    sum += p.scratch.sums[(block * p.HV + head) * width + i];
  }
  if (i == 0) {
    if (p.dA_log.present) store_parameter(p.dA_log, head, sum);
  } else if (p.ddt_bias.present) {
    store_parameter(p.ddt_bias, head * p.gate_width + i - 1, sum);
  }
}

// Zero in the gradients of rows that belong to no sequence.
__global__ void __launch_bounds__(kThreads) padding_kernel(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const int64_t index = blockIdx.x, num = gridDim.x;
  zero_padding(p.tokens, p.dq, p.H, p.K, index, num);
  zero_padding(p.tokens, p.dk, p.H, p.K, index, num);
  zero_padding(p.tokens, p.dv, p.HV, p.V, index, num);
  zero_padding(p.tokens, p.dgv, p.HV, p.V, index, num);
  zero_padding(p.tokens, p.dbeta, p.HV, p.beta_kind == BetaKind::value ? p.V : 1, index, num);
  zero_padding(p.tokens, p.dg, p.HV, p.gate_width, index, num);
}

}  // namespace deltic::gpu::backward
