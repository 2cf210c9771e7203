// What the convolution's kernels get.
#pragma once

#include "core/problem.h"
#include "cuda/tile/slots.cuh"

namespace deltic::gpu::conv {

// How the numbers of a state lie that a thread moves at once.
enum class Order {
  elements,  // one by one
  channels,  // runs of a place's neighbouring channels: [S,D]
  inputs     // all inputs of neighbouring channels are one run: [D,S] with S = W - 1
};
struct Inputs {
  States states;
  Order order;
};

// Weights and biases: number (d, j) is at d * s_channel + j * s_tap.
struct Numbers {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool present = false;
  int64_t s_channel = 0, s_tap = 0;

  __device__ int64_t at(int64_t d, int64_t j = 0) const { return d * s_channel + j * s_tap; }
};

struct Params {
  Tokens tokens;
  SlotLists slots;
  Indices accepted;
  int32_t channels;  // D: below 2^31, as tokens, slots and runs are
  int32_t kept;      // S: inputs of a channel in a state
  int32_t taps;      // W
  bool is_silu;
  bool has_weight_runs;  // the weights of a thread's channels are one run
  bool has_bias_runs;    // and their biases
  // Numbers of runs of tokens: of 2^run_log2 tokens each, or (below 0) whole sequences.
  int32_t run_log2;
  unsigned runs_dense;  // per sequence of a dense batch
  int32_t num_runs;
  // A CTA has `runs_per_cta` neighbouring runs of blockDim.x threads' channels.
  unsigned num_columns, num_parts;
  int32_t runs_per_cta;

  Rows x, out;                 // [B,T,D]
  Numbers weight, bias;        // [D,W], [D]
  Inputs state_in, state_out;  // [slots,D,S]
  Inputs ckpt;                 // [slots,D,S]
  Indices ckpt_cu, ckpt_tokens, ckpt_slots;

  // The gradient.
  Rows d_out, dx;             // [B,T,D]
  Inputs d_final, d_initial;  // [N,D,S]
  Numbers dweight, dbias;     // [D,W], [D]
  bool wants_sums;
  float* sums;  // [num_parts][W + 1][D]: of the weights, then the bias
};

}  // namespace deltic::gpu::conv
