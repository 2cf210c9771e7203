// The gradients of gates and of their cumulative sums: a thread has one head's channel over tiles
// of 64 tokens. Sums of parameters are in fp64 from the first token on and rounded once.
#pragma once

#include "cuda/sm80/block_gradients/params.h"
#include "cuda/tile/gate_gradients.cuh"

namespace deltic::gpu::block_gradients {

struct GateParams {
  Tokens tokens;
  int64_t HV, width;  // width: K, or 1 for gates per head
  // A CTA has 128 columns (head, channel) and one tile of every num_parts, from its own on.
  int64_t num_columns, num_tiles;
  uint32_t num_parts;
  int32_t W;
  bool sums, reverse;
  deltic_gate_form form;
  float scale, lower_bound;
  Rows g, d_out, dg;  // [B,T,HV] or [B,T,HV,K]
  Param A_log, dt_bias, dA_log, ddt_bias;
  double *A_sums, *bias_sums;  // [part][HV * width] each, or null
};

inline constexpr int kBatch = 16;  // loads under way together; divides every chunk length

// Numbers of a column, `step` elements apart; 0 where is_token(i) is false. The dtype is looked at
// once.
template <class F>
__device__ void load_batch(const Rows& x, int64_t at, int64_t step, F&& is_token,
                           float (&out)[kBatch]) {
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* from = static_cast<const E*>(x.data) + at;
#pragma unroll
    for (int i = 0; i < kBatch; ++i, from += step) out[i] = is_token(i) ? to_float(*from) : 0.0f;
  });
}
template <class F>
__device__ void store_batch(const Rows& x, int64_t at, int64_t step, F&& is_token,
                            const float (&value)[kBatch]) {
  if (!x.present) return;
  with_dtype(x.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    E* to = static_cast<E*>(x.data) + at;
#pragma unroll
    for (int i = 0; i < kBatch; ++i, to += step) {
      if (is_token(i)) *to = from_float<E>(value[i]);
    }
  });
}

// A tile of a column: dy_t = scale sum_{i>=t} d_out_i (reverse: i <= t), in fp64, and 0 where the
// sum has the bound; then the gate's form.
__device__ inline void run_gate_tile(const GateParams& p, const TokenTile& tile, int64_t head,
                                     int64_t channel, float rate, float bias, double& A_sum,
                                     double& bias_sum) {
  const auto at = [&](const Rows& x, int row) {
    return offset(x, tile.batch, tile.begin, head) + channel + row * x.st;
  };
  const int sign = p.reverse ? 1 : -1;  // against the direction of the forward sum
  double sum = 0;
  for (int first = 0; first < kTileTokens; first += kBatch) {
    const int start = p.reverse ? first : kTileTokens - 1 - first;
    const auto is_token = [&](int i) { return start + sign * i < tile.length; };
    float g[kBatch], d[kBatch];
    load_batch(p.g, at(p.g, start), sign * p.g.st, is_token, g);
    load_batch(p.d_out, at(p.d_out, start), sign * p.d_out.st, is_token, d);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if ((first + i) % p.W == 0) sum = 0;
      if (!is_token(i)) continue;
      float dy = d[i];
      if (p.sums) {
        sum += static_cast<double>(dy);
        dy = static_cast<float>(static_cast<double>(p.scale) * sum);
        if (log_decay(p.form, p.lower_bound, g[i], rate, bias) < kMinLogDecay) dy = 0;
      }
      const GateGradient gradient = log_decay_gradient(p.form, p.lower_bound, g[i], rate, bias, dy);
      A_sum += static_cast<double>(gradient.A_log);
      bias_sum += static_cast<double>(gradient.g);
      g[i] = gradient.g;
    }
    store_batch(p.dg, at(p.dg, start), sign * p.dg.st, is_token, g);
  }
}

// CTAs are (part, column block), blocks fastest.
__global__ void __launch_bounds__(kThreads, 1)
    gate_gradients_kernel(const __grid_constant__ GateParams p) {
  if (is_wrong(p.tokens)) return;
  const auto num_blocks = static_cast<unsigned>((p.num_columns + kThreads - 1) / kThreads);
  const unsigned part = blockIdx.x / num_blocks;
  const unsigned column = blockIdx.x % num_blocks * kThreads + threadIdx.x;
  if (column >= p.num_columns) return;
  const unsigned width = static_cast<unsigned>(p.width);
  const int64_t head = column / width, channel = column % width;
  float rate = 1, bias = 0;
  if (p.form != DELTIC_GATE_LOG_DECAY) {
    if (p.A_log.present) rate = gate_rate(load_param(p.A_log, head));
    if (p.dt_bias.present) bias = load_param(p.dt_bias, column);
  }
  double A_sum = 0, bias_sum = 0;
  for (int64_t number = part; number < p.num_tiles; number += p.num_parts) {
    const TokenTile tile = find_tile(p.tokens, static_cast<unsigned>(number));
    if (tile.length > 0) run_gate_tile(p, tile, head, channel, rate, bias, A_sum, bias_sum);
  }
  if (p.A_sums != nullptr) p.A_sums[part * p.num_columns + column] = A_sum;
  if (p.bias_sums != nullptr) p.bias_sums[part * p.num_columns + column] = bias_sum;
}

// dA_log and ddt_bias of a head: parts in order, then channels by threads and threads in order.
__global__ void __launch_bounds__(kThreads) gate_sums_kernel(const __grid_constant__ GateParams p) {
  __shared__ double threads[kThreads];
  if (is_wrong(p.tokens)) return;
  const int64_t head = blockIdx.x;
  double A_sum = 0;
  for (int64_t channel = threadIdx.x; channel < p.width; channel += kThreads) {
    const int64_t column = head * p.width + channel;
    double bias_sum = 0;
    for (unsigned part = 0; part < p.num_parts; ++part) {
      const int64_t at = part * p.num_columns + column;
      if (p.A_sums != nullptr) A_sum += p.A_sums[at];
      if (p.bias_sums != nullptr) bias_sum += p.bias_sums[at];
    }
    if (p.ddt_bias.present) {
      store(p.ddt_bias.data, p.ddt_bias.dtype, param_offset(p.ddt_bias, column),
            static_cast<float>(bias_sum));
    }
  }
  if (!p.dA_log.present) return;
  threads[threadIdx.x] = A_sum;
  __syncthreads();  // every thread's sum
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kThreads; ++i) A_sum += threads[i];
  store(p.dA_log.data, p.dA_log.dtype, param_offset(p.dA_log, head), static_cast<float>(A_sum));
}

}  // namespace deltic::gpu::block_gradients
