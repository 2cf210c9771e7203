// The gradient of the L2 norm of rows: a warp has one. With y = r x, r = 1 / sqrt(sum x^2 + 1e-6),
// and p the part of dy along x, dx = r ((dy - p) + 1e-6 r^2 p): finite at x = 0, and nothing is
// added that cancels. Sums in fp64.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::block_gradients {

struct NormParams {
  Tokens tokens;
  int64_t heads, width, num_rows;  // rows: batch, token, head; fewer than 2^32
  Rows x, d_out, dx;               // [B,T,H,D]
};

inline constexpr int kNormWarps = 4;
inline constexpr int kHeld = 8;  // numbers a lane keeps: rows of up to 256 are read once

__device__ inline void norm_gradient_row(const NormParams& p, int64_t b, int64_t t, int64_t h,
                                         int lane) {
  const int64_t x_at = offset(p.x, b, t, h), d_at = offset(p.d_out, b, t, h);
  const int width = static_cast<int>(p.width);
  const bool is_padding = t >= padding_begin(p.tokens);
  float x[kHeld], d[kHeld];
  load_lanes(p.x.data, p.x.dtype, x_at, lane, width, x);
  load_lanes(p.d_out.data, p.d_out.dtype, d_at, lane, width, d);
  double squares = 0, dot = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    squares += static_cast<double>(x[i]) * x[i];
    dot += static_cast<double>(x[i]) * d[i];
  }
  for (int c = lane + 32 * kHeld; c < width; c += 32) {
    const double y = load(p.x.data, p.x.dtype, x_at + c);
    squares += y * y;
    dot += y * load(p.d_out.data, p.d_out.dtype, d_at + c);
  }
  squares = sum_lanes<32>(squares), dot = sum_lanes<32>(dot);
  const double r = rsqrt(squares + kNormEps);
  const double along = dot * r * r;
  const auto gradient = [&](float value, float dy) {
    return is_padding ? 0.0f : static_cast<float>(r * (dy - along * value));
  };
  with_dtype(p.dx.dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    E* row = static_cast<E*>(p.dx.data) + offset(p.dx, b, t, h);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = lane + 32 * i;
      if (c < width) row[c] = from_float<E>(gradient(x[i], d[i]));
    }
    for (int c = lane + 32 * kHeld; c < width; c += 32) {
      row[c] = from_float<E>(gradient(load(p.x.data, p.x.dtype, x_at + c),
                                      load(p.d_out.data, p.d_out.dtype, d_at + c)));
    }
  });
}

__global__ void __launch_bounds__(32 * kNormWarps)
    norm_gradient_kernel(const __grid_constant__ NormParams p) {
  if (is_wrong(p.tokens)) return;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kNormWarps + threadIdx.x / 32;
  if (row >= p.num_rows) return;
  const unsigned heads = static_cast<unsigned>(p.heads), T = static_cast<unsigned>(p.tokens.T);
  const unsigned token = static_cast<unsigned>(row) / heads;
  const unsigned h = static_cast<unsigned>(row) - token * heads;
  norm_gradient_row(p, token / T, token % T, h, threadIdx.x % 32);
}

}  // namespace deltic::gpu::block_gradients
