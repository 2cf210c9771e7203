// Rows of the gated norm: a row is in the registers of neighbouring lanes. Functions that exchange
// numbers are called by all lanes of a warp together; none has a barrier.
#pragma once

#include <cfloat>

#include "cuda/ptx/prefetch.cuh"
#include "cuda/sm80/norm/params.h"
#include "cuda/sm80/norm/traits.h"
#include "cuda/tile/activations.cuh"
#include "cuda/tile/runs.cuh"

namespace deltic::gpu::norm {

struct RowPlace {
  uint32_t batch, token, head;
};
__device__ inline RowPlace find_row(const Params& p, uint32_t row) {
  if (p.is_flat) return {0, 0, row};
  const uint32_t token = row / p.heads, T = static_cast<uint32_t>(p.tokens.T);
  return {token / T, token % T, row - token * p.heads};
}
// Rows from this one on belong to no sequence.
__device__ inline uint32_t padding_row(const Params& p) {
  if (!p.tokens.packed) return p.num_rows;
  return static_cast<uint32_t>(padding_begin(p.tokens)) * p.heads;
}

// A lane's part of a row as it lies in memory.
template <class Tr>
struct Raw {
  Run<typename Tr::E, Tr::kVec> runs[Tr::kRuns];
};
// Where run i of a lane begins.
template <class Tr>
__device__ int column_of(int lane, int i) {
  return (i * Tr::kLanes + lane) * Tr::kVec;
}
// Zeros beyond the row, and of a row that is not there.
template <class Tr>
__device__ void load_raw(const Params& p, const Rows& x, const RowPlace& at, int lane,
                         bool is_there, Raw<Tr>& to) {
  using E = typename Tr::E;
  const E* row = static_cast<const E*>(x.data) + offset(x, at.batch, at.token, at.head);
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
    const int c = column_of<Tr>(lane, i);
    to.runs[i] = {};
    if (is_there && c < static_cast<int>(p.width)) to.runs[i] = load_run<E, Tr::kVec>(row + c);
  }
}
template <class Tr>
__device__ void unpack_raw(const Raw<Tr>& raw, float (&out)[Tr::kRuns][Tr::kVec]) {
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) unpack_run<typename Tr::E, Tr::kVec>(raw.runs[i], out[i]);
}
// The same into L2 alone, which is allowed before the launch ahead has ended: whoever reads the row
// later finds what is there then.
template <class Tr>
__device__ void prefetch_raw(const Params& p, const Rows& x, const RowPlace& at, int lane) {
  using E = typename Tr::E;
  const E* row = static_cast<const E*>(x.data) + offset(x, at.batch, at.token, at.head);
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
    const int c = column_of<Tr>(lane, i);
    if (c < static_cast<int>(p.width)) line_prefetch(row + c);
  }
}
template <class Tr>
__device__ void store_raw(const Params& p, const Rows& x, const RowPlace& at, int lane,
                          const float (&from)[Tr::kRuns][Tr::kVec]) {
  using E = typename Tr::E;
  E* row = static_cast<E*>(x.data) + offset(x, at.batch, at.token, at.head);
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
    const int c = column_of<Tr>(lane, i);
    if (c < static_cast<int>(p.width)) store_run<E, Tr::kVec>(row + c, from[i]);
  }
}

template <class Tr>
__device__ void load_weights(const Params& p, int lane, float (&w)[Tr::kRuns][Tr::kVec]) {
  if (p.has_weight_runs) {
#pragma unroll
    for (int i = 0; i < Tr::kRuns; ++i) {
      const int c = column_of<Tr>(lane, i);
      if (c < static_cast<int>(p.width)) {
        load_run<Tr::kVec>(p.weight.data, p.weight.dtype, c, w[i]);
      } else {
#pragma unroll
        for (int k = 0; k < Tr::kVec; ++k) w[i][k] = 0;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) {
      const int c = column_of<Tr>(lane, i) + k;
      w[i][k] = c >= static_cast<int>(p.width) ? 0.0f
                : p.weight.present ? load(p.weight.data, p.weight.dtype, c * p.weight.strides[0])
                                   : 1.0f;
    }
  }
}

// 1 / sqrt(mean x^2 + eps). In fp64 where squares of finite numbers leave the range of fp32 on
// either side. All lanes of the warp come along then, but a row's way is its own alone.
constexpr float kLeastMean = 1e-30f;  // of smaller ones squares below 2^-126 are a part
template <class Tr>
__device__ float reciprocal_rms(const Params& p, const float (&x)[Tr::kRuns][Tr::kVec]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) sum = fmaf(x[i][k], x[i][k], sum);
  }
  const float mean = fmaf(sum_lanes<Tr::kLanes>(sum), p.inverse_width, p.eps);
  const bool is_narrow = mean >= kLeastMean && mean <= FLT_MAX;
  if (__any_sync(0xFFFFFFFFu, !is_narrow)) {
    double wide = 0;
#pragma unroll
    for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
      for (int k = 0; k < Tr::kVec; ++k) wide += static_cast<double>(x[i][k]) * x[i][k];
    }
    wide = sum_lanes<Tr::kLanes>(wide);
    wide = wide / p.width + static_cast<double>(p.eps);
    if (!is_narrow) return static_cast<float>(rsqrt(wide));
  }
  return rsqrtf(mean);
}

// Calls f with the gate as a function: the call's activation is looked at once for all numbers of a
// row, whose special functions then overlap.
template <class F>
__device__ void with_gate(const Params& p, F&& f) {
  if (!p.z.present) return f([](float) { return Activated{1.0f, 0.0f}; });
  switch (p.activation) {
    case DELTIC_ACTIVATION_NONE:
      return f([](float z) { return activate(DELTIC_ACTIVATION_NONE, z); });
    case DELTIC_ACTIVATION_SIGMOID:
      return f([](float z) { return activate(DELTIC_ACTIVATION_SIGMOID, z); });
    default:
      return f([](float z) { return activate(DELTIC_ACTIVATION_SILU, z); });
  }
}

// x becomes y.
template <class Tr>
__device__ void gate_row(const Params& p, const float (&w)[Tr::kRuns][Tr::kVec],
                         const float (&z)[Tr::kRuns][Tr::kVec], float (&x)[Tr::kRuns][Tr::kVec]) {
  const float r = reciprocal_rms<Tr>(p, x);
  with_gate(p, [&](auto gate) {
#pragma unroll
    for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
      for (int k = 0; k < Tr::kVec; ++k) {
        x[i][k] = x[i][k] * r * w[i][k] * gate(z[i][k]).value;  // r times w may overflow
      }
    }
  });
}

// With n = r x: dy becomes dx, z becomes dz, and dw grows by the row's part. A row that is not
// there is zeros, and adds none whatever eps is.
template <class Tr>
__device__ void gate_row_gradient(const Params& p, bool is_there,
                                  const float (&w)[Tr::kRuns][Tr::kVec],
                                  float (&x)[Tr::kRuns][Tr::kVec], float (&z)[Tr::kRuns][Tr::kVec],
                                  float (&dy)[Tr::kRuns][Tr::kVec],
                                  float (&dw)[Tr::kRuns][Tr::kVec]) {
  float r = reciprocal_rms<Tr>(p, x);
  if (!is_there) r = 0;
  float along = 0;
  with_gate(p, [&](auto gate) {
#pragma unroll
    for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
      for (int k = 0; k < Tr::kVec; ++k) {
        const Activated a = gate(z[i][k]);
        const float n = x[i][k] * r, gated = dy[i][k] * a.value;
        dw[i][k] = fmaf(gated, n, dw[i][k]);
        z[i][k] = dy[i][k] * n * w[i][k] * a.slope;
        x[i][k] = n, dy[i][k] = gated * w[i][k];
        along = fmaf(dy[i][k], n, along);
      }
    }
  });
  const float mean = sum_lanes<Tr::kLanes>(along) * p.inverse_width;
#pragma unroll
  for (int i = 0; i < Tr::kRuns; ++i) {
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) dy[i][k] = r * fmaf(-x[i][k], mean, dy[i][k]);
  }
}

}  // namespace deltic::gpu::norm
