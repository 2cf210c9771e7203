// dq and dk of a chunk: sums over the group's value heads, and out, through the norms.
#pragma once

#include "cuda/sm90/backward/stage_inputs.cuh"

namespace deltic::gpu::gradient {

// Without decays per channel dq and dk of the group's value heads so far stay as threads have them,
// in memory of the CTA's own: no other reads them.
template <class Tr>
using GroupSums = float4[2 * Tr::kTiles];
template <class Tr>
__device__ float4* group_sums_of(const Params& p) {
  return reinterpret_cast<float4*>(p.work.group_sums) +
         int64_t{blockIdx.x} * (2 * Tr::kTiles * Tr::kThreads) + thread_index();
}
template <class Tr>
__device__ void load_sums(const Params& p, GroupSums<Tr>& sums) {
  const float4* from = group_sums_of<Tr>(p);
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) sums[n] = from[n * Tr::kThreads];
}
template <class Tr>
__device__ void add_sums(const GroupSums<Tr>& sums, Fragment<Tr>& dq, Fragment<Tr>& dk) {
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) {
    float(&x)[4] = n < Tr::kTiles ? dq[n] : dk[n - Tr::kTiles];
    x[0] += sums[n].x, x[1] += sums[n].y, x[2] += sums[n].z, x[3] += sums[n].w;
  }
}
template <class Tr>
__device__ void store_sums(const Params& p, const Fragment<Tr>& dq, const Fragment<Tr>& dk) {
  float4* to = group_sums_of<Tr>(p);
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) {
    const float(&x)[4] = n < Tr::kTiles ? dq[n] : dk[n - Tr::kTiles];
    to[n * Tr::kThreads] = {x[0], x[1], x[2], x[3]};
  }
}

// A thread's eight channels of rows kStep apart, K / 8 neighbours a row.
template <class Tr>
struct RowPieces {
  static constexpr int kPieces = Tr::K / 8, kStep = Tr::kThreads / kPieces, kRows = kChunk / kStep;
  static_assert(kChunk % kStep == 0);
};
// Rows of q and k as the call has them, which the gradients of norms need, asked for ahead.
template <class Tr>
struct RawRows : RowPieces<Tr> {
  using RowPieces<Tr>::kPieces, RowPieces<Tr>::kStep, RowPieces<Tr>::kRows;
  uint4 q[kRows], k[kRows];
  __device__ void load(const Params& p, const TokenTile& tile, int64_t key_head) {
    using E = typename Tr::E;
    const int row = thread_index() / kPieces, c = thread_index() % kPieces * 8;
    const auto load = [&](const Rows& x, uint4(&to)[kRows]) {
      const E* from =
          static_cast<const E*>(x.data) + offset(x, tile.batch, tile.begin + row, key_head) + c;
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += x.st * kStep) {
        if (row + i * kStep < tile.length) to[i] = *reinterpret_cast<const uint4*>(from);
      }
    };
    load(p.q, q), load(p.k, k);
  }
};
// Gradients y of rows x through their norms r = 1 / sqrt(x x + 1e-6), of which `norms` has every
// kStep-th: dx = r (dy - r^2 x (x dy)). In fp32: dy has errors of 16-bit operands.
template <class Tr, int N>
__device__ void through_norms(const uint4 (&words)[N], const float* norms, float (&y)[N][8]) {
  using E = typename Tr::E;
  float dot[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x[8];
    unpack<E>(words[i], x);
    dot[i] = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) dot[i] = fmaf(x[e], y[i][e], dot[i]);
  }
  sum_each<RowPieces<Tr>::kPieces>(dot);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float r = norms[i * RowPieces<Tr>::kStep], along = dot[i] * r * r;
    float x[8];
    unpack<E>(words[i], x);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[i][e] = r * fmaf(-along, x[e], y[i][e]);
  }
}

// dq and dk of the chunk's rows: on the sums of the group's value heads so far, and out with the
// last one, through the norm.
template <class Tr>
__device__ void store_rows(const Params& p, const GradientShared<Tr>& s, const TokenTile& tile,
                           int64_t key_head, bool is_first, bool is_last, const RawRows<Tr>& raw) {
  using E = typename Tr::E;
  using Pieces = RowPieces<Tr>;
  constexpr int kStep = Pieces::kStep, kRows = Pieces::kRows;
  const int row = thread_index() / Pieces::kPieces, c = thread_index() % Pieces::kPieces * 8;
  float4* sum =
      reinterpret_cast<float4*>(p.work.group_sums + int64_t{blockIdx.x} * (2 * kChunk * Tr::K)) +
      2 * thread_index();
#pragma unroll 1
  for (int side = 0; side < 2; ++side, sum += 2 * kRows * Tr::kThreads) {
    const bool is_q = side == 0;
    const float* from = is_q ? &s.x.sum.dq[row][c] : &s.x.sum.dk[row][c];
    float y[kRows][8];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        *reinterpret_cast<float4*>(y[i] + n) =
            *reinterpret_cast<const float4*>(from + i * kStep * Tr::kPitch + n);
      }
      if (!(is_first && is_last)) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float4& to = sum[2 * i * Tr::kThreads + n];
          float4 z = is_first ? float4{0, 0, 0, 0} : to;
          z.x += y[i][4 * n], z.y += y[i][4 * n + 1];
          z.z += y[i][4 * n + 2], z.w += y[i][4 * n + 3];
          if (!is_last) to = z;
          y[i][4 * n] = z.x, y[i][4 * n + 1] = z.y, y[i][4 * n + 2] = z.z, y[i][4 * n + 3] = z.w;
        }
      }
    }
    const Rows& dx = is_q ? p.dq : p.dk;
    if (!is_last || !dx.present) continue;  // all threads
    if (p.l2norm) {
      uint4 words[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) words[i] = is_q ? raw.q[i] : raw.k[i];
      through_norms<Tr>(words, &s.norms[is_q][row], y);
    }
    const bool is_wide = is_q ? p.dq_vectors : p.dk_vectors;
    E* to = static_cast<E*>(dx.data) + offset(dx, tile.batch, tile.begin + row, key_head) + c;
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += dx.st * kStep) {
      if (row + i * kStep >= tile.length) continue;
      if (is_wide) {
        *reinterpret_cast<uint4*>(to) = gpu::pack<E>(y[i]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = from_float<E>(y[i][e]);
      }
    }
  }
}

}  // namespace deltic::gpu::gradient
