// Rows of any width, dtypes and strides: a warp has one and reads it twice; fp32, sums in fp64. And
// the second pass of the weight's gradient. In one source file alone: none is a template.
#pragma once

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/norm/params.h"
#include "cuda/sm80/norm/stage_rows.cuh"
#include "cuda/tile/sums.cuh"

namespace deltic::gpu::norm {

// A warp's row: where it lies in each tensor.
struct WarpRow {
  const Params& p;
  RowPlace at;
  int lane;

  __device__ float get(const Rows& x, uint32_t c) const {
    return load(x.data, x.dtype, offset(x, at.batch, at.token, at.head) + c);
  }
  __device__ void put(const Rows& x, uint32_t c, float value) const {
    store(x.data, x.dtype, offset(x, at.batch, at.token, at.head) + c, value);
  }
  __device__ float weight(uint32_t c) const {
    return p.weight.present ? load_param(p.weight, c) : 1.0f;
  }
  __device__ Activated gate(uint32_t c) const {
    return p.z.present ? activate(p.activation, get(p.z, c)) : Activated{1.0f, 0.0f};
  }
  __device__ float reciprocal() const {
    double sum = 0;
    for (uint32_t c = lane; c < p.width; c += 32) {
      const double x = get(p.x, c);
      sum += x * x;
    }
    sum = sum_lanes<32>(sum);
    return static_cast<float>(rsqrt(sum / p.width + static_cast<double>(p.eps)));
  }

  __device__ void forward() const {
    const float r = reciprocal();
    for (uint32_t c = lane; c < p.width; c += 32) {
      put(p.out, c, get(p.x, c) * r * weight(c) * gate(c).value);
    }
  }
  // With q the part of dn along n, dx = r ((dn - q) + eps r^2 q): a row that is nearly parallel to
  // its gradient keeps its digits. dw is this warp's alone.
  __device__ void backward(float* dw) const {
    const float r = reciprocal();
    double along = 0, squares = 0;
    for (uint32_t c = lane; c < p.width; c += 32) {
      const Activated a = gate(c);
      const float n = get(p.x, c) * r, dy = get(p.d_out, c), dn = dy * a.value * weight(c);
      if (p.dz.present) put(p.dz, c, dy * n * weight(c) * a.slope);
      if (dw != nullptr) dw[c] += dy * a.value * n;
      along += static_cast<double>(dn) * n, squares += static_cast<double>(n) * n;
    }
    along = sum_lanes<32>(along), squares = sum_lanes<32>(squares);
    const double rest = 1 - static_cast<double>(p.eps) * r * r;
    const double factor = squares == 0 ? 0 : along / squares * rest;
    for (uint32_t c = lane; c < p.width && p.dx.present; c += 32) {
      const float n = get(p.x, c) * r, dn = get(p.d_out, c) * gate(c).value * weight(c);
      put(p.dx, c, r * static_cast<float>(dn - factor * n));
    }
  }
};

// One warp to a CTA.
__global__ void __launch_bounds__(32)
    general_kernel(const __grid_constant__ Params p, bool is_gradient) {
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens)) return;
  const uint32_t begin = blockIdx.x * p.per_part, end = min(begin + p.per_part, p.num_rows);
  const uint32_t real = padding_row(p);
  const int lane = static_cast<int>(threadIdx.x);
  float* dw = p.sums == nullptr ? nullptr : p.sums + int64_t{blockIdx.x} * p.width;
  for (uint32_t c = lane; c < p.width && dw != nullptr; c += 32) dw[c] = 0;
  for (uint32_t i = begin; i < end; ++i) {
    const WarpRow row{p, find_row(p, i), lane};
    if (i < real) {
      is_gradient ? row.backward(dw) : row.forward();
      continue;
    }
    for (uint32_t c = lane; c < p.width; c += 32) {
      if (p.out.present) row.put(p.out, c, 0);
      if (p.dx.present) row.put(p.dx, c, 0);
      if (p.dz.present) row.put(p.dz, c, 0);
    }
  }
}

// A CTA has 32 weights, and a warp of it 1 / 32 of their parts: one thread alone would wait for L2
// as often as parts come in batches, 20 us of a call with 656. The slices are added in order.
inline constexpr int kSumColumns = 32, kSumSlices = 32, kSumThreads = kSumColumns * kSumSlices;
__global__ void __launch_bounds__(kSumThreads) sums_kernel(const __grid_constant__ Params p) {
  __shared__ double s_sums[kSumSlices][kSumColumns];
  grid_wait();
  if (is_wrong(p.tokens)) return;
  const uint32_t column = threadIdx.x % kSumColumns, slice = threadIdx.x / kSumColumns;
  const uint32_t c = blockIdx.x * kSumColumns + column;
  const uint32_t each = (p.num_parts + kSumSlices - 1) / kSumSlices;
  const uint32_t first = min(slice * each, p.num_parts), end = min(first + each, p.num_parts);
  if (c < p.width) {
    s_sums[slice][column] =
        sum_of_parts(p.sums + int64_t{first} * p.width, end - first, p.width, c);
  }
  __syncthreads();  // all slices are there, for the first warp
  if (slice > 0 || c >= p.width) return;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kSumSlices; ++i) sum += s_sums[i][column];
  store(p.dweight.data, p.dweight.dtype, param_offset(p.dweight, c), static_cast<float>(sum));
}

}  // namespace deltic::gpu::norm
