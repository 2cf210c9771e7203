// The L2 norm of rows, fp32 with sums in fp64.
#pragma once

#include "core/problem.h"

namespace deltic::gpu {

// 1 / sqrt(sum x^2 + 1e-6) of two rows over the warp, or over every kLanes of its lanes. The sums
// are in fp64: squares of large fp32 numbers overflow fp32.
template <int N, int kLanes = 32>
__device__ void reciprocal_norms(const float (&x)[N], const float (&y)[N], float& rx, float& ry) {
  double sx = 0, sy = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sx += static_cast<double>(x[i]) * x[i];
    sy += static_cast<double>(y[i]) * y[i];
  }
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) {
    const double ox = __shfl_xor_sync(0xFFFFFFFFu, sx, m), oy = __shfl_xor_sync(0xFFFFFFFFu, sy, m);
    sx += ox, sy += oy;
  }
  rx = static_cast<float>(rsqrt(sx + kNormEps));
  ry = static_cast<float>(rsqrt(sy + kNormEps));
}

// y = r x, as above; dy becomes dx. With p the part of dy along y, dx = r ((dy - p) + 1e-6 r^2 p),
// finite at x = 0. dy - y (y . dy) is the same where y . y is 1 - 1e-6 r^2, but a rounded y is off
// by 6e-8: 6 % of what is left of a dy along y. Hence p by the y there is, and in fp64.
template <int N, int kLanes = 32>
__device__ void normalize_gradient(const float (&y)[N], float r, float (&dy)[N]) {
  double dot = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dot += static_cast<double>(y[i]) * dy[i];
    squares += static_cast<double>(y[i]) * y[i];
  }
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) {
    const double od = __shfl_xor_sync(0xFFFFFFFFu, dot, m);
    const double os = __shfl_xor_sync(0xFFFFFFFFu, squares, m);
    dot += od, squares += os;
  }
  const double along = squares == 0 ? 0 : dot / squares * (1 - kNormEps * r * r);
#pragma unroll
  for (int i = 0; i < N; ++i) dy[i] = r * static_cast<float>(dy[i] - along * y[i]);
}

}  // namespace deltic::gpu
