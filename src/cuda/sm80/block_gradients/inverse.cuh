// The gradient of X = (I + A)^-1: dA = -X^T D X^T, below the diagonal, where alone D counts. A CTA
// has a tile of a head: chunks as blocks on the diagonal, which stay among themselves.
#pragma once

#include "cuda/sm80/block_gradients/stage_rows.cuh"

namespace deltic::gpu::block_gradients {

struct InverseShared {
  alignas(16) float x[kLowerFloats];
  alignas(16) float d[kLowerFloats];  // D, then X^T D, then X^T D X^T
};

// X, visible: the result with its unit diagonal, or formed from A.
__device__ inline void load_inverse(const Params& p, const Place& at, InverseShared& s) {
  const bool is_result = p.out.present;
  load_lower<kThreads>(is_result ? p.out : p.a, at.tile, at.head, p.W, 0, s.x);
  __syncthreads();  // the triangle is there
  if (is_result) {
    if (threadIdx.x < kTileTokens) s.x[threadIdx.x * (kLowerPitch + 1)] = 1.0f;
    __syncthreads();  // and its diagonal
  } else if (p.W == 64) {
    invert<Triangles<64, kLowerPitch>>(s.x, this_warp(), this_lane());
  } else if (p.W == 32) {
    invert<Triangles<32, kLowerPitch>>(s.x, this_warp(), this_lane());
  } else {
    invert<Triangles<16, kLowerPitch>>(s.x, this_warp(), this_lane());
  }
}

// Of the warp's block row, blocks of its chunk up to the diagonal.
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Params p) {
  __shared__ InverseShared s;
  __shared__ Place at;
  if (is_wrong(p.tokens) || !find_place(p, p.HV, at)) return;
  load_lower<kThreads>(p.d_out, at.tile, at.head, p.W, 0, s.d);
  load_inverse(p, at, s);  // its barriers make D visible too
  const int w = this_warp(), lane = this_lane(), first = first_block(w, p.W);
  const int end = end_block(w, p.W);
  float c[kWarps][2][4] = {};
#pragma unroll
  for (int j = 0; j < kWarps; ++j) {
    if (j < first || j > w) continue;
    for (int l = w; l < end; ++l) {
      multiply_blocks<kLowerPitch, kLowerPitch, true>(s.x + Triangle::at(l, w),
                                                      s.d + Triangle::at(l, j), lane, c[j]);
    }
  }
  __syncthreads();  // D has been read
  put_blocks(c, p.W, 1.0f, s.d);
  __syncwarp();  // the warp's block row of X^T D: no other warp reads it
  float product[kWarps][2][4] = {};
#pragma unroll
  for (int j = 0; j < kWarps; ++j) {
    if (j < first || j > w) continue;
    for (int m = first; m <= j; ++m) {
      multiply_blocks<kLowerPitch, kLowerPitch, false, true>(
          s.d + Triangle::at(w, m), s.x + Triangle::at(j, m), lane, product[j]);
    }
  }
  __syncwarp();  // X^T D has been read
  put_blocks(product, p.W, -1.0f, s.d);
  __syncthreads();  // dA is there
  store_lower<kThreads>(p.da, at.tile, at.head, p.W, 0,
                        [&](int r, int c) { return s.d[r * kLowerPitch + c]; });
}

}  // namespace deltic::gpu::block_gradients
