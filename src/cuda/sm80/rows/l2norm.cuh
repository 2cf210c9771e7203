// The L2 norm of rows: a warp has one.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::rows {

struct NormParams {
  Tokens tokens;
  int64_t heads, width, num_rows;  // rows: batch, token, head; fewer than 2^32
  Rows x, out, rstd;               // [B,T,H,D], [B,T,H,D], [B,T,H]
};

inline constexpr int kNormWarps = 4;
inline constexpr int kHeld = 8;  // numbers a lane keeps: rows of up to 256 are read once

__device__ inline void normalize_row(const NormParams& p, int64_t b, int64_t t, int64_t h,
                                     int lane) {
  const int64_t from = offset(p.x, b, t, h), to = offset(p.out, b, t, h);
  // Tokens of no sequence: zeros.
  const float factor = t < padding_begin(p.tokens) ? 1.0f : 0.0f;
  const int width = static_cast<int>(p.width);
  float x[kHeld];
  load_lanes(p.x.data, p.x.dtype, from, lane, width, x);
  // In fp64: squares of large fp32 numbers overflow fp32.
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) sum += static_cast<double>(x[i]) * x[i];
  for (int c = lane + 32 * kHeld; c < width; c += 32) {
    const double y = load(p.x.data, p.x.dtype, from + c);
    sum += y * y;
  }
#pragma unroll
  for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, m);
  const float r = factor == 0 ? 0.0f : static_cast<float>(rsqrt(sum + kNormEps));
  with_dtype(p.out.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    E* row = static_cast<E*>(p.out.data) + to;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = lane + 32 * i;
      if (c < width) row[c] = from_float<E>(factor == 0 ? 0.0f : x[i] * r);
    }
    for (int c = lane + 32 * kHeld; c < width; c += 32) {
      const float y = load(p.x.data, p.x.dtype, from + c);
      row[c] = from_float<E>(factor == 0 ? 0.0f : y * r);
    }
  });
  if (p.rstd.present && lane == 0) store(p.rstd.data, p.rstd.dtype, offset(p.rstd, b, t, h), r);
}

__global__ void __launch_bounds__(32 * kNormWarps)
    l2norm_kernel(const __grid_constant__ NormParams p) {
  if (is_wrong(p.tokens)) return;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kNormWarps + threadIdx.x / 32;
  if (row >= p.num_rows) return;
  const unsigned heads = static_cast<unsigned>(p.heads), T = static_cast<unsigned>(p.tokens.T);
  const unsigned token = static_cast<unsigned>(row) / heads;
  const unsigned h = static_cast<unsigned>(row) - token * heads;
  normalize_row(p, token / T, token % T, h, threadIdx.x % 32);
}

}  // namespace deltic::gpu::rows
