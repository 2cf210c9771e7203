// The gated norm and its gradient: rows of a CTA, the next ones on their way.
#pragma once

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/norm/stage_rows.cuh"

namespace deltic::gpu::norm {

// A thread's place: lane of a row's group, and which group.
template <class Tr>
struct Place {
  int lane = static_cast<int>(threadIdx.x % Tr::kLanes);
  uint32_t group = threadIdx.x / Tr::kLanes;
  uint32_t begin, end;  // rows of the CTA

  __device__ explicit Place(const Params& p)
      : begin(blockIdx.x * p.per_part), end(min(begin + p.per_part, p.num_rows)) {}
};

// Rows of no sequence, behind the others, by all threads of the CTA that has them.
template <class Tr>
__device__ void zero_rows(const Params& p, const Rows& x, uint32_t first, uint32_t end) {
  if (!x.present) return;
  const Place<Tr> at(p);
  const float zeros[Tr::kRuns][Tr::kVec] = {};
  for (uint32_t row = first + at.group; row < end; row += Tr::kGroups) {
    store_raw<Tr>(p, x, find_row(p, row), at.lane, zeros);
  }
}

// The first rows of a CTA on their way to L2 while the launch ahead ends: all of a decode step's.
template <class Tr>
__device__ void prefetch_rows(const Params& p, const Place<Tr>& at) {
#pragma unroll 1
  for (uint32_t i = 0, row = at.begin + at.group; i < kPrefetched && row < at.end; ++i) {
    const RowPlace place = find_row(p, row);
    prefetch_raw<Tr>(p, p.x, place, at.lane);
    if (p.z.present) prefetch_raw<Tr>(p, p.z, place, at.lane);
    if (p.d_out.present) prefetch_raw<Tr>(p, p.d_out, place, at.lane);
    row += Tr::kGroups;
  }
}

// Both kernels start before the launch ahead of them ends, and let the next one come.
template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kForwardCtas)
    forward_kernel(const __grid_constant__ Params p) {
  const Place<Tr> at(p);
  prefetch_rows<Tr>(p, at);
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens)) return;
  const uint32_t real = min(at.end, padding_row(p));
  float w[Tr::kRuns][Tr::kVec];
  load_weights<Tr>(p, at.lane, w);
  Raw<Tr> x_next, z_next{};
  const auto request = [&](uint32_t row) {
    const RowPlace place = find_row(p, min(row, p.num_rows - 1));
    load_raw<Tr>(p, p.x, place, at.lane, row < real, x_next);
    if (p.z.present) load_raw<Tr>(p, p.z, place, at.lane, row < real, z_next);
  };
  request(at.begin + at.group);
  // As often for all threads: lanes of other rows take part in exchanges.
#pragma unroll 1
  for (uint32_t first = at.begin; first < real; first += Tr::kGroups) {
    const uint32_t row = first + at.group;
    float x[Tr::kRuns][Tr::kVec], z[Tr::kRuns][Tr::kVec];
    unpack_raw<Tr>(x_next, x), unpack_raw<Tr>(z_next, z);
    request(row + Tr::kGroups);
    gate_row<Tr>(p, w, z, x);
    if (row < real) store_raw<Tr>(p, p.out, find_row(p, row), at.lane, x);
  }
  zero_rows<Tr>(p, p.out, max(real, at.begin), at.end);
}

// The groups' sums one after the other, in order, then the CTA's own into scratch.
template <class Tr>
__device__ void leave_sums(const Params& p, const Place<Tr>& at,
                           const float (&dw)[Tr::kRuns][Tr::kVec]) {
  __shared__ float s_sums[Tr::kWidth];
#pragma unroll 1
  for (uint32_t g = 0; g < Tr::kGroups; ++g) {
    if (at.group == g) {
#pragma unroll
      for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
        for (int k = 0; k < Tr::kVec; ++k) {
          float& sum = s_sums[column_of<Tr>(at.lane, i) + k];
          sum = g == 0 ? dw[i][k] : sum + dw[i][k];
        }
      }
    }
    __syncthreads();  // group g has added, for group g + 1 and the threads below
  }
  for (uint32_t c = threadIdx.x; c < p.width; c += kThreads) {
    p.sums[int64_t{blockIdx.x} * p.width + c] = s_sums[c];
  }
}

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kBackwardCtas)
    backward_kernel(const __grid_constant__ Params p) {
  const Place<Tr> at(p);
  prefetch_rows<Tr>(p, at);
  grid_wait();
  grid_release();
  if (is_wrong(p.tokens)) return;
  const uint32_t real = min(at.end, padding_row(p));
  float w[Tr::kRuns][Tr::kVec], dw[Tr::kRuns][Tr::kVec] = {};
  load_weights<Tr>(p, at.lane, w);
  Raw<Tr> x_next, z_next{}, d_next;
  const auto request = [&](uint32_t row) {
    const RowPlace place = find_row(p, min(row, p.num_rows - 1));
    load_raw<Tr>(p, p.x, place, at.lane, row < real, x_next);
    load_raw<Tr>(p, p.d_out, place, at.lane, row < real, d_next);
    if (p.z.present) load_raw<Tr>(p, p.z, place, at.lane, row < real, z_next);
  };
  request(at.begin + at.group);
#pragma unroll 1
  for (uint32_t first = at.begin; first < real; first += Tr::kGroups) {
    const uint32_t row = first + at.group;
    float x[Tr::kRuns][Tr::kVec], z[Tr::kRuns][Tr::kVec], dy[Tr::kRuns][Tr::kVec];
    unpack_raw<Tr>(x_next, x), unpack_raw<Tr>(z_next, z), unpack_raw<Tr>(d_next, dy);
    request(row + Tr::kGroups);
    gate_row_gradient<Tr>(p, row < real, w, x, z, dy, dw);
    if (row >= real) continue;
    const RowPlace place = find_row(p, row);
    if (p.dx.present) store_raw<Tr>(p, p.dx, place, at.lane, dy);
    if (p.dz.present) store_raw<Tr>(p, p.dz, place, at.lane, z);
  }
  zero_rows<Tr>(p, p.dx, max(real, at.begin), at.end);
  zero_rows<Tr>(p, p.dz, max(real, at.begin), at.end);
  if (p.sums != nullptr) leave_sums<Tr>(p, at, dw);
}

}  // namespace deltic::gpu::norm
