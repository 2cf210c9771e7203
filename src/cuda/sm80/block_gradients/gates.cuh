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

// A tile of a column: dy_t = scale sum_{i>=t} d_out_i (reverse: i <= t), in fp64, and 0 where the
// sum has the bound; then the gate's form.
__device__ inline void run_gate_tile(const GateParams& p, const TokenTile& tile, int64_t head,
                                     int64_t channel, float rate, float bias, double& A_sum,
                                     double& bias_sum) {
  const int64_t g_at = offset(p.g, tile.batch, tile.begin, head) + channel;
  const int64_t d_at = offset(p.d_out, tile.batch, tile.begin, head) + channel;
  const int64_t to = offset(p.dg, tile.batch, tile.begin, head) + channel;
  double sum = 0;
  for (int first = 0; first < kTileTokens; first += kBatch) {
    // The row of the batch's i-th number: against the direction of the forward sum.
    const auto row = [&](int i) { return p.reverse ? first + i : kTileTokens - 1 - first - i; };
    float g[kBatch], d[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool is_token = row(i) < tile.length;
      g[i] = is_token ? load(p.g.data, p.g.dtype, g_at + row(i) * p.g.st) : 0.0f;
      d[i] = is_token ? load(p.d_out.data, p.d_out.dtype, d_at + row(i) * p.d_out.st) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if ((first + i) % p.W == 0) sum = 0;
      if (row(i) >= tile.length) continue;
      float dy = d[i];
      if (p.sums) {
        sum += static_cast<double>(dy);
        dy = static_cast<float>(static_cast<double>(p.scale) * sum);
        if (log_decay(p.form, p.lower_bound, g[i], rate, bias) < kMinLogDecay) dy = 0;
      }
      const GateGradient gradient = log_decay_gradient(p.form, p.lower_bound, g[i], rate, bias, dy);
      A_sum += static_cast<double>(gradient.A_log);
      bias_sum += static_cast<double>(gradient.g);
      if (p.dg.present) store(p.dg.data, p.dg.dtype, to + row(i) * p.dg.st, gradient.g);
    }
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
