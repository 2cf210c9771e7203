// What the gated norm's kernels get.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::norm {

struct Params {
  Tokens tokens;
  uint32_t heads, width;         // H, D
  uint32_t num_rows;             // (batch, token, head), heads fastest: fewer than 2^31
  uint32_t num_parts, per_part;  // CTAs with work, rows of each
  // Row i of every tensor lies i times its head stride from its start: no division finds it.
  bool is_flat;
  bool has_weight_runs;  // the weights of a lane are runs
  float inverse_width;   // 1 / D: exact where D is a power of two
  deltic_activation activation;
  float eps;
  Rows x, z, out;  // [B,T,H,D]
  Param weight;    // [D]

  // The gradient.
  Rows d_out, dx, dz;  // [B,T,H,D]
  Param dweight;       // [D]
  float* sums;         // [num_parts][D]; null: nobody asked
};

}  // namespace deltic::gpu::norm
