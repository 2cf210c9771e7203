// Operands of a chunk, element by element (warpgroups 0 and 1 of a preparing CTA).
//
// A thread owns 16 consecutive tokens of two adjacent channels, so products of decays run along
// registers. For a pair i > j the level h is the highest bit in which i and j differ; the row
// factor is the product of decays from the level's boundary to i, the column factor from j + 1 to
// the boundary: nothing above 1 is formed for g <= 0, and only tokens j + 1 .. i are looked at.
// Every level has 32 row tokens and 32 column tokens: one 64 x 32 x 128 product for k and q rows.
#pragma once
#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

template <int i>
using Index = std::integral_constant<int, i>;

// exp(g) from raw g, one channel. slope and bias carry log2(e).
template <GateForm kForm>
__device__ inline float decay_of(float raw, float slope, float bias, float bound) {
  if constexpr (kForm == GateForm::kBounded) {  // 2^inf = inf, 1/inf = 0: no clamp needed
    return exp2_approx(bound * rcp_approx(1.f + exp2_approx(fmaf(raw, slope, bias))));
  } else if constexpr (kForm == GateForm::kSoftplus) {
    const float y = fmaf(raw, kLog2e, bias);
    return exp2_approx(slope * (fmaxf(y, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(y)))));
  } else {
    return exp2_approx(raw * kLog2e);
  }
}

struct Rows {
  uint32_t k[16], q[16];
  float fs[16][2];  // product from the start of the token's block to the token
  float te[16][2];  // product from after the token to the end of its block
};

// Operands of level h inside 16 tokens, then blocks of 2 h. kQueries: are there any? (In a transfer
// there are none, and what stands in their place is multiplied for nothing.)
template <class E, bool kQueries, int h>
__device__ inline void local_level(Rows& r, uint32_t rows, uint32_t columns, uint32_t lane4) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int tr = i / h * 2 * h + h + i % h, tc = i / h * 2 * h + i % h;
    const uint32_t at = i * 128 + (lane4 ^ (i << 4));
    const uint32_t f = pack<E>(r.fs[tr][0], r.fs[tr][1]);
    store_shared(rows + at, multiply_packed<E>(r.k[tr], f));
    if constexpr (kQueries) store_shared(rows + 32 * 128 + at, multiply_packed<E>(r.q[tr], f));
    uint32_t c = r.k[tc];
    if (i % h != h - 1) c = multiply_packed<E>(c, pack<E>(r.te[tc][0], r.te[tc][1]));
    store_shared(columns + at, c);
  }
#pragma unroll
  for (int b = 0; b < 8 / h; b++)
#pragma unroll
    for (int ch = 0; ch < 2; ch++) {
      const float lower = r.fs[2 * h * b + h - 1][ch], upper = r.fs[2 * h * b + 2 * h - 1][ch];
#pragma unroll
      for (int i = 0; i < h; i++) {
        float& te = r.te[2 * h * b + i][ch];
        te = i == h - 1 ? upper : te * upper;
        r.fs[2 * h * b + h + i][ch] *= lower;
      }
    }
}
// Operands of 16 tokens whose boundary lies f further on: rows (k and q) or columns (k).
template <class E, bool kQueries>
__device__ inline void far_rows(const Rows& r, float2 f, uint32_t rows, uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t x = pack<E>(r.fs[t][0] * f.x, r.fs[t][1] * f.y);
    store_shared(rows + at, multiply_packed<E>(r.k[t], x));
    if constexpr (kQueries) store_shared(rows + 32 * 128 + at, multiply_packed<E>(r.q[t], x));
  }
}
template <class E>
__device__ inline void far_columns(const Rows& r, float2 f, uint32_t columns, uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t x = t < 15 ? pack<E>(r.te[t][0] * f.x, r.te[t][1] * f.y) : pack<E>(f.x, f.y);
    store_shared(columns + at, multiply_packed<E>(r.k[t], x));
  }
}

struct RawTiles {  // addresses of a warp's 16 tokens and 64 channels
  uint32_t k, q, g;
};
// The packet's operands in the raw tiles' place. before, after: decay of the blocks before and
// after this one.
template <class E, bool kQueries>
__device__ inline void put_operands(const Rows& r, float2 before, float2 after, RawTiles to,
                                    uint32_t lane4) {
#pragma unroll
  for (int t = 0; t < 16; t++) {
    const uint32_t at = t * 128 + (lane4 ^ ((t & 7) << 4));
    const uint32_t f = pack<E>(r.fs[t][0] * before.x, r.fs[t][1] * before.y);
    store_shared(to.k + at, multiply_packed<E>(r.k[t], f));
    if constexpr (kQueries) store_shared(to.q + at, multiply_packed<E>(r.q[t], f));
    store_shared(to.g + at,
                 multiply_packed<E>(r.k[t], pack<E>((t < 15 ? r.te[t][0] : 1.f) * after.x,
                                                    (t < 15 ? r.te[t][1] : 1.f) * after.y)));
  }
}
// Past the end: k = q = 0, decay 1.
__device__ inline void clear_rows(Rows& r, int tokens_left) {
#pragma unroll
  for (int t = 0; t < 16; t++)
    if (t >= tokens_left) r.k[t] = r.q[t] = 0, r.fs[t][0] = r.fs[t][1] = 1.f;
}

// Two channels' gates of 16 tokens, fp32 or a 16-bit type, zeros from `count` on. All loads are
// under way before a number is looked at; the pointer walks, as 16 of them would spill.
__device__ inline void load_gates(const Values& g, const void* chunk, int token, int channel,
                                  int count, float (&x)[16][2]) {
  const int64_t at = token * g.st + channel;
  const bool is_wide = g.type == Number::kF32;
  const int64_t step = g.st * (is_wide ? 4 : 2);
  auto* from = static_cast<const uint8_t*>(chunk) + at * (is_wide ? 4 : 2);
  auto walk = [&](auto load) {
#pragma unroll
    for (int t = 0; t < 16; t++) {
      x[t][0] = x[t][1] = 0.f;
      if (t < count) load(t);
      from += step;
      asm volatile("" : "+l"(from));
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
    const float2 f = g.type == Number::kBf16 ? unpack<__nv_bfloat16>(bits) : unpack<__half>(bits);
    x[t][0] = f.x, x[t][1] = f.y;
  }
}

// Keys, queries and decays of 16 tokens from block b on, `tokens_left` of them there, from the raw
// tiles; kWideGate: gates come by ordinary loads.
template <GateForm kForm, bool kWideGate, bool kQueries>
__device__ inline void load_rows(Rows& r, const Stage& stage, const Params& params, int b,
                                 int channel, int tokens_left, RawTiles from, uint32_t lane4) {
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
    r.fs[t][0] = decay_of<kForm>(g.x, slope, bias.x, bound);
    r.fs[t][1] = decay_of<kForm>(g.y, slope, bias.y, bound);
  }
}

// 256 threads, every item of the CTA. Tiles and numbers come by raw_full, operands of levels leave
// by the full and come back by the empty barriers, the packet's operands leave by rows_done.
template <class E, GateForm kForm, bool kWideGate, bool kQueries>
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
    const RawTiles tiles = {smem_u32(s.k[st]) + raw, smem_u32(s.q[st]) + raw,
                            smem_u32(s.g[st]) + raw};
    Rows r;
    load_rows<kForm, kWideGate, kQueries>(r, stage, params, b, channel, tokens_left, tiles, lane4);
    if (tokens_left < 16) clear_rows(r, tokens_left);
    auto rows_at = [&](Level& l, int row) { return smem_u32(l.rows) + half * 8192 + row * 128; };
    auto cols_at = [&](Level& l, int row) { return smem_u32(l.columns) + half * 4096 + row * 128; };
    fill_level(Index<0>{}, n, [&](Level& l, uint32_t lane4) {
      local_level<E, kQueries, 1>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<1>{}, n, [&](Level& l, uint32_t lane4) {
      local_level<E, kQueries, 2>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<2>{}, n, [&](Level& l, uint32_t lane4) {
      local_level<E, kQueries, 4>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
    });
    fill_level(Index<3>{}, n, [&](Level& l, uint32_t lane4) {
      local_level<E, kQueries, 8>(r, rows_at(l, 8 * b), cols_at(l, 8 * b), lane4);
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
      Level& l = s.level[i];
      const uint32_t lane4 = 4 * (thread_index() % 32);
      float2 f = make_float2(1.f, 1.f);
      if (far && b == 3) f = total(2);
      if (far && b == 0) f = total(1);
      const int row = far ? 16 * (b & 1) : 8 * (b & 2);
      if (b & (1 + far))
        far_rows<E, kQueries>(r, f, rows_at(l, row), lane4);
      else
        far_columns<E>(r, f, cols_at(l, row), lane4);
      fence_async_proxy();
      named_arrive(kFullBarrier + i, kRowThreads + kScoreThreads);
    }
    // Every thread writes where it has read; the norms, too, have been read when a level has been
    // multiplied.
    float2 before = make_float2(1.f, 1.f), after = before;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 f = total(i);
      if (i < b) before.x *= f.x, before.y *= f.y;
      if (i > b) after.x *= f.x, after.y *= f.y;
    }
    put_operands<E, kQueries>(r, before, after, tiles, lane4);
    fence_async_proxy();
    barrier_arrive(&s.rows_done[st]);
  }
}

}  // namespace deltic::gpu::forward
