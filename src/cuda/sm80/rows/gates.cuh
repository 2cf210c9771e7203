// Gates and their cumulative sums: a thread has one head's channel over a tile of 64 tokens.
#pragma once

#include "cuda/tile/chunks.cuh"
#include "cuda/tile/gates.cuh"

namespace deltic::gpu::rows {

struct GateParams {
  Tokens tokens;
  int64_t heads, width;          // width: K, or 1 for gates per head
  int64_t num_parts, num_items;  // parts of kThreads columns (head, channel); parts times tiles
  int32_t W;
  bool sums, reverse;
  deltic_gate_form form;
  float scale, lower_bound;
  Rows g, out;  // [B,T,HV] or [B,T,HV,K]
  Param A_log, dt_bias;
};

inline constexpr int kThreads = 128;
inline constexpr int kBatch = 16;  // loads under way together; divides every chunk length

// out_i = scale times the sum of the chunk's log decays up to row i (reverse: from row i on). The
// sum is in fp64: 64 terms of -104 would cost fp32 3e-4. Memory is the limit all the same.
__device__ inline void run_column(const GateParams& p, const TokenTile& tile, int64_t head,
                                  int64_t channel) {
  float rate = 1, bias = 0;
  if (p.form != DELTIC_GATE_LOG_DECAY) {
    if (p.A_log.present) rate = gate_rate(load_param(p.A_log, head));
    if (p.dt_bias.present) bias = load_param(p.dt_bias, head * p.width + channel);
  }
  const int64_t from = offset(p.g, tile.batch, tile.begin, head) + channel;
  const int64_t to = offset(p.out, tile.batch, tile.begin, head) + channel;
  double sum = 0;
  for (int first = 0; first < kTileTokens; first += kBatch) {
    float x[kBatch];
    // Row of the batch's i-th number; reverse, the tile's tokens come from its end.
    const auto row = [&](int i) { return p.reverse ? kTileTokens - 1 - first - i : first + i; };
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = row(i);
      x[i] = r < tile.length ? load(p.g.data, p.g.dtype, from + r * p.g.st) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = row(i);
      if ((first + i) % p.W == 0) sum = 0;
      if (r >= tile.length) continue;
      float y = log_decay(p.form, p.lower_bound, x[i], rate, bias);
      if (p.sums) {
        sum += static_cast<double>(clamp_log_decay(y));
        y = static_cast<float>(static_cast<double>(p.scale) * sum);
      }
      store(p.out.data, p.out.dtype, to + r * p.out.st, y);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) gates_kernel(const __grid_constant__ GateParams p) {
  if (is_wrong(p.tokens)) return;
  const unsigned index = blockIdx.x, parts = static_cast<unsigned>(p.num_parts);
  if (index >= p.num_items) {
    zero_padding(p.tokens, p.out, p.heads, p.width, index - p.num_items, kPaddingCtas);
    return;
  }
  const TokenTile tile = find_tile(p.tokens, index / parts);
  // Fewer columns than CTAs times threads: 32 bits are enough.
  const unsigned column = index % parts * kThreads + threadIdx.x;
  const unsigned width = static_cast<unsigned>(p.width);
  if (tile.length == 0 || column >= p.heads * p.width) return;
  run_column(p, tile, column / width, column % width);
}

}  // namespace deltic::gpu::rows
