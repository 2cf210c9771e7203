// Long sequences in segments: transfers (M, E) of all segments at once, the states at their borders
// from these, and then all segments as sequences of their own. Exact for every gate; differs from
// one pass by rounding.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm90/forward/params.h"

namespace deltic::gpu::forward {

// Value rows per CTA: rows of S pass through M independently. Columns of M's product are summed by
// groups of threads, so many rows of M each, two columns to a thread.
constexpr int kMergeRows = 8, kMergeThreads = 512;
constexpr int kGroupThreads = kWidth / 2, kMergeGroups = kMergeThreads / kGroupThreads;
constexpr int kGroupRows = kWidth / kMergeGroups;
static_assert(kMergeRows * kWidth == 2 * kMergeThreads, "a thread has two numbers of the state");
struct MergeSmem {
  alignas(128) float m[2][kWidth * kWidth];
  float s[kMergeRows][kWidth];
  float sums[kMergeGroups][kMergeRows][kWidth];
  uint64_t full[2];
  uint8_t is_short[kMaxWindows];  // of the sequence's pieces but the last
};

// The group's part of S M^T.
__device__ inline void multiply_rows(MergeSmem& s, const float* m, int key_width) {
  const int group = int(threadIdx.x) / kGroupThreads,
            column = 2 * (int(threadIdx.x) % kGroupThreads);
  float2 sum[kMergeRows] = {};
  const int first = kGroupRows * group, end = min(first + kGroupRows, key_width);
#pragma unroll 2
  for (int c = first; c < end; c += 4) {  // M has no more rows
    float2 b[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      b[j] = *reinterpret_cast<const float2*>(m + (c + j) * kWidth + column);
#pragma unroll
    for (int r = 0; r < kMergeRows; r++) {
      const float4 a = *reinterpret_cast<const float4*>(&s.s[r][c]);
      sum[r].x += a.x * b[0].x + a.y * b[1].x + a.z * b[2].x + a.w * b[3].x;
      sum[r].y += a.x * b[0].y + a.y * b[1].y + a.z * b[2].y + a.w * b[3].y;
    }
  }
#pragma unroll
  for (int r = 0; r < kMergeRows; r++)
    *reinterpret_cast<float2*>(&s.sums[group][r][column]) = sum[r];
}

// CTA (rows / 8, head, sequence): S <- S M^T + E along the pieces, fp32. Writes the state before
// every piece; behind a short one its transfer has done so.
static __global__ __launch_bounds__(kMergeThreads) void merge_segments(
    const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  MergeSmem& s = *reinterpret_cast<MergeSmem*>(smem);
  const int tid = threadIdx.x, row = blockIdx.x * kMergeRows, head = blockIdx.y;
  const int own_row = tid / kGroupThreads, column = 2 * (tid % kGroupThreads);
  const int64_t size = kWidth * kWidth, hv = p.num_value_heads;
  grid_wait();
  if (row >= kWidth / 2 && p.value_width <= kWidth / 2) return;  // nobody carries these
  const float* const m = p.transfer + p.max_pieces * hv * size;
  if (tid == 0) {
    barrier_init(&s.full[0], 1), barrier_init(&s.full[1], 1);
    fence_barrier_init();
  }
  __syncthreads();
  uint32_t phase[2] = {};
  for (int seq = blockIdx.z; seq < p.num_sequences; seq += gridDim.z) {
    const int begin = p.first_piece[seq], end = p.first_piece[seq + 1];
    const auto is_short = [&](int i) { return p.forgotten && s.is_short[i - begin]; };
    auto load = [&](int i) {
      if (is_short(i)) return;
      uint64_t* bar = &s.full[(i - begin) & 1];
      barrier_expect(bar, sizeof(s.m[0]));
      bulk_load(s.m[(i - begin) & 1], m + (i * hv + head) * size, sizeof(s.m[0]), bar);
    };
    __syncthreads();  // the buffers of the sequence before have been read
    if (p.forgotten) {
      for (int i = begin + tid; i < min(end, begin + kMaxWindows); i += kMergeThreads)
        s.is_short[i - begin] = uint8_t(p.pieces[i].is_short);
      __syncthreads();  // all of them are there
    }
    if (tid == 0)
      for (int i = begin; i < min(begin + 2, end - 1); i++) load(i);
    const int slot = p.pieces[begin].read_slot;
    const auto given = [&](int k) {
      const StateView& in = p.state_in;
      const int v = row + own_row;
      return slot >= 0 && v < p.value_width && k < p.key_width
                 ? state_number(in, slot * in.s_slot + head * in.s_head + k * in.s_k + v * in.s_v)
                 : 0.f;
    };
    float2 x = make_float2(given(column), given(column + 1));
    for (int i = begin; i < end; i++) {
      const int64_t at = (i * hv + head) * size + (row + own_row) * kWidth + column;
      const int buffer = (i - begin) & 1;
      if (i == begin || !is_short(i - 1)) *reinterpret_cast<float2*>(p.segment_state + at) = x;
      if (i + 1 == end) break;
      __syncthreads();  // s, the sums and the other buffer of m have been read
      if (tid == 0 && i > begin && i + 1 < end - 1) load(i + 1);
      if (is_short(i)) {
        if (i + 1 < end - 1 && !is_short(i + 1))  // the next one's transfer is of this state
          x = *reinterpret_cast<const float2*>(p.segment_state + at + hv * size);
        continue;
      }
      const float2 e = *reinterpret_cast<const float2*>(p.transfer + at);  // while M is multiplied
      *reinterpret_cast<float2*>(&s.s[own_row][column]) = x;
      __syncthreads();  // the state is there
      barrier_wait(&s.full[buffer], phase[buffer]);
      phase[buffer] ^= 1;
      multiply_rows(s, s.m[buffer], p.key_width);
      __syncthreads();  // all sums are there
      x = e;
#pragma unroll
      for (int g = 0; g < kMergeGroups; g++) {
        const float2 sum = *reinterpret_cast<const float2*>(&s.sums[g][own_row][column]);
        x.x += sum.x, x.y += sum.y;
      }
    }
  }
}

}  // namespace deltic::gpu::forward
