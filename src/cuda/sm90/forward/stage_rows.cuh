// Operands of a chunk, element by element (warpgroups 0 and 1 of a preparing CTA).
#pragma once
#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

template <int i>
using Index = std::integral_constant<int, i>;

// Two channels' gates of 16 tokens, fp32 or a 16-bit type, zeros from `count` on. All loads are
// under way before a number is looked at; the pointer walks, as 16 of them would spill.
__device__ inline void load_gates(const Rows& g, const void* chunk, int token, int channel,
                                  int count, float (&x)[16][2]) {
  const int64_t at = token * g.st + channel;
  const bool is_wide = g.dtype == DType::f32;
  const int64_t step = g.st * (is_wide ? 4 : 2);
  auto* from = static_cast<const uint8_t*>(chunk) + at * (is_wide ? 4 : 2);
  auto walk = [&](auto load) {
#pragma unroll
    for (int t = 0; t < 16; t++) {
      x[t][0] = x[t][1] = 0.f;
      if (t < count) load(t);
      from += step;
      keep_here(from);
    }
  };
  if (is_wide) {
    walk([&](int t) {
      const float2 f = __ldg(reinterpret_cast<const float2*>(from));
      x[t][0] = f.x, x[t][1] = f.y;
    });
    return;
  }
  walk([&](int t) { x[t][0] = __uint_as_float(__ldg(reinterpret_cast<const uint32_t*>(from))); });
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t bits = __float_as_uint(x[t][0]);
    const float2 f = g.dtype == DType::bf16 ? unpack<__nv_bfloat16>(bits) : unpack<__half>(bits);
    x[t][0] = f.x, x[t][1] = f.y;
  }
}

// Keys, queries and decays of 16 tokens from block b on, `tokens_left` of them there, from the raw
// tiles; kWideGate: gates come by ordinary loads.
template <deltic_gate_form kForm, bool kWideGate, bool kQueries>
__device__ inline void load_rows(chunk::Rows& r, const Stage& stage, const Params& params, int b,
                                 int channel, int tokens_left, chunk::RawTiles from,
                                 uint32_t lane4) {
  const float slope = stage.slope, bound = params.lower_bound * kLog2e;
  const float2 bias = *reinterpret_cast<const float2*>(&stage.bias[channel]);
  if constexpr (kWideGate)
    load_gates(params.g_channel, stage.item.g, 16 * b, channel,
               channel < params.key_width ? tokens_left : 0, r.fs);
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    float2 g = make_float2(r.fs[t][0], r.fs[t][1]);
    if constexpr (!kWideGate) g = unpack<__nv_bfloat16>(load_shared(from.g + at));
    r.k[t] = load_shared(from.k + at), r.q[t] = kQueries ? load_shared(from.q + at) : 0;
    r.fs[t][0] = channel_decay<kForm>(g.x, slope, bias.x, bound);
    r.fs[t][1] = channel_decay<kForm>(g.y, slope, bias.y, bound);
  }
}

// Operands of block b's rows with the decays to the chunk's ends. total(i): of block i's tokens.
template <class E, bool kQueries, class Total>
__device__ inline void put_rows(chunk::Rows& r, int b, Total total, const chunk::RawTiles& tiles,
                                uint32_t lane4) {
  float2 before = make_float2(1.f, 1.f), after = before;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 f = total(i);
    if (i < b) before.x *= f.x, before.y *= f.y;
    if (i > b) after.x *= f.x, after.y *= f.y;
  }
  chunk::put_operands<E, kQueries>(r, before, after, tiles, lane4);
}

// 256 threads, every item of the CTA. Tiles and numbers come by raw_full, operands of levels leave
// by the full and come back by the empty barriers, the packet's operands leave by rows_done.
template <class E, deltic_gate_form kForm, bool kWideGate, bool kQueries>
__device__ inline void prepare_rows(PrepareSmem& s, const Params& params, int num_items) {
  // lane4 anew in each: kept over all of them it would cost a register and its sums some more.
  auto fill_level = [&](auto level, int n, auto write) {
    constexpr int l = decltype(level)::value, i = l % kLevelBuffers;
    if (l >= kLevelBuffers || n > 0) named_sync(kEmptyBarrier + i, kRowThreads + kScoreThreads);
    write(s.level[i], uint32_t(4 * (thread_index() % 32)));
    fence_async_proxy();
    named_arrive(kFullBarrier + i, kRowThreads + kScoreThreads);
  };
#pragma unroll 1
  for (int n = 0; n < num_items; n++) {
    const int tid = thread_index(), warp = tid / 32;
    const int half = warp & 1, b = warp >> 1;  // 64 channels; 16 tokens
    const uint32_t lane4 = 4 * (tid % 32);
    const int channel = 64 * half + 2 * (tid % 32);
    const int st = n % kRawStages;
    barrier_wait(&s.raw_full[st], (n / kRawStages) & 1);
    const Stage& stage = s.stage[st];
    const int tokens_left = stage.item.tokens_left - 16 * b;
    const uint32_t raw = half * kHalfBytes + 16 * b * 128;
    const chunk::RawTiles tiles = {smem_u32(s.k[st]) + raw, smem_u32(s.q[st]) + raw,
                                   smem_u32(s.g[st]) + raw};
    chunk::Rows r;
    load_rows<kForm, kWideGate, kQueries>(r, stage, params, b, channel, tokens_left, tiles, lane4);
    if (tokens_left < 16) chunk::clear_rows(r, tokens_left);
    auto rows_at = [&](chunk::Level& l, int row) {
      return smem_u32(l.rows) + half * 8192 + row * 128;
    };
    auto cols_at = [&](chunk::Level& l, int row) {
      return smem_u32(l.columns) + half * 4096 + row * 128;
    };
    fill_level(Index<0>{}, n, [&](chunk::Level& l, uint32_t lane4) {
      chunk::local_level<E, kQueries, 1>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<1>{}, n, [&](chunk::Level& l, uint32_t lane4) {
      chunk::local_level<E, kQueries, 2>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<2>{}, n, [&](chunk::Level& l, uint32_t lane4) {
      chunk::local_level<E, kQueries, 4>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<3>{}, n, [&](chunk::Level& l, uint32_t lane4) {
      chunk::local_level<E, kQueries, 8>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    *reinterpret_cast<float2*>(&s.total[n & 1][b][channel]) = make_float2(r.fs[15][0], r.fs[15][1]);
    named_sync(kRowBarrier, kRowThreads);  // totals of all four blocks
    auto total = [&](int i) {
      return *reinterpret_cast<const float2*>(&s.total[n & 1][i][channel]);
    };
    // Levels 16 and 32, one code for both: blocks 1 and 3, then 2 and 3 are rows. The block away
    // from the boundary has the other's total as factor.
#pragma unroll 1
    for (int far = 0; far < 2; far++) {
      static_assert(5 % kLevelBuffers == 4 % kLevelBuffers + 1);
      const int i = 4 % kLevelBuffers + far;
      named_sync(kEmptyBarrier + i, kRowThreads + kScoreThreads);
      chunk::Level& l = s.level[i];
      const uint32_t lane4 = 4 * (thread_index() % 32);
      float2 f = make_float2(1.f, 1.f);
      if (far && b == 3) f = total(2);
      if (far && b == 0) f = total(1);
      const int row = far ? 16 * (b & 1) : 8 * (b & 2);
      if (b & (1 + far))
        chunk::far_rows<E, kQueries>(r, f, rows_at(l, row), lane4);
      else
        chunk::far_columns<E>(r, f, cols_at(l, row), lane4);
      fence_async_proxy();
      named_arrive(kFullBarrier + i, kRowThreads + kScoreThreads);
    }
    // Every thread writes where it has read; the norms, too, have been read when a level has been
    // multiplied.
    put_rows<E, kQueries>(r, b, total, tiles, lane4);
    fence_async_proxy();
    barrier_arrive(&s.rows_done[st]);
  }
}

}  // namespace deltic::gpu::forward
