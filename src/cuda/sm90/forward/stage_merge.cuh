// Long sequences in segments: transfers (M, E) of all segments at once, the states at their borders
// from these, and then all segments as sequences of their own. Exact for every gate; differs from
// one pass by rounding.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm90/forward/params.h"

namespace deltic::gpu::forward {

constexpr int kMergeRows = 8;  // value rows per CTA: rows of S pass through M independently
struct MergeSmem {
  alignas(128) float m[2][kWidth * kWidth];
  float s[kMergeRows][kWidth];
  uint64_t full[2];
  uint8_t is_short[kMaxWindows];  // of the sequence's pieces but the last
};

// CTA (rows / 8, head, sequence), 128 threads: S <- S M^T + E along the pieces, fp32. Writes the
// state before every piece; behind a short one its transfer has done so.
static __global__ __launch_bounds__(kWidth) void merge_segments(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  MergeSmem& s = *reinterpret_cast<MergeSmem*>(raw);
  const int tid = threadIdx.x, row = blockIdx.x * kMergeRows, head = blockIdx.y;
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
      for (int i = begin + tid; i < min(end, begin + kMaxWindows); i += kWidth)
        s.is_short[i - begin] = uint8_t(p.pieces[i].is_short);
      __syncthreads();  // all of them are there
    }
    if (tid == 0)
      for (int i = begin; i < min(begin + 2, end - 1); i++) load(i);
    const int slot = p.pieces[begin].read_slot;
    float x[kMergeRows];
#pragma unroll
    for (int r = 0; r < kMergeRows; r++) {
      const StateView& in = p.state_in;
      x[r] = slot >= 0 && row + r < p.value_width && tid < p.key_width
                 ? state_number(
                       in, slot * in.s_slot + head * in.s_head + tid * in.s_k + (row + r) * in.s_v)
                 : 0.f;
    }
    for (int i = begin; i < end; i++) {
      const int64_t at = (i * hv + head) * size + row * kWidth + tid;
      const int buffer = (i - begin) & 1;
      if (i == begin || !is_short(i - 1)) {
#pragma unroll
        for (int r = 0; r < kMergeRows; r++) p.segment_state[at + r * kWidth] = x[r];
      }
      if (i + 1 == end) break;
      __syncthreads();  // s and the other buffer of m have been read
      if (tid == 0 && i > begin && i + 1 < end - 1) load(i + 1);
      if (is_short(i)) {
        if (i + 1 < end - 1 && !is_short(i + 1)) {  // the next one's transfer is of this state
#pragma unroll
          for (int r = 0; r < kMergeRows; r++) x[r] = p.segment_state[at + hv * size + r * kWidth];
        }
        continue;
      }
#pragma unroll
      for (int r = 0; r < kMergeRows; r++) {
        s.s[r][tid] = x[r];
        x[r] = p.transfer[at + r * kWidth];
      }
      __syncthreads();
      barrier_wait(&s.full[buffer], phase[buffer]);
      phase[buffer] ^= 1;
#pragma unroll 4
      for (int c = 0; c < p.key_width; c += 4) {  // M has no more rows
        float b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = s.m[buffer][(c + j) * kWidth + tid];
#pragma unroll
        for (int r = 0; r < kMergeRows; r++) {
          const float4 a = *reinterpret_cast<const float4*>(&s.s[r][c]);
          x[r] += a.x * b[0] + a.y * b[1] + a.z * b[2] + a.w * b[3];
        }
      }
    }
  }
}

}  // namespace deltic::gpu::forward
