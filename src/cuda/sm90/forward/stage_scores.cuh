// Norms, scores and the inverse of a chunk (warpgroups 2 and 3 of a preparing CTA, every other
// chunk each). Lane = 4 g + x as in the accumulators of mma: rows g, g + 8, columns 2x, 2x + 1.
#pragma once
#include <cstddef>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/stage_invert.cuh"
#include "cuda/sm90/forward/stage_load.cuh"

namespace deltic::gpu::forward {

__device__ inline void sync_scores(int which) { sync_own<kScoreBarrier, kScoreThreads>(which); }

// Diagonals of k k^T, q q^T and q k^T of the warp's 16 tokens; use(token, kk, qq, qk) runs in the
// lane that has the token's.
template <class E, class Use>
__device__ inline void token_diagonals(const uint8_t* k_tile, const uint8_t* q_tile, int warp,
                                       const Lane& ln, Use use) {
#pragma unroll 1  // instructions of all roles together should stay in the SM's cache
  for (int i = 0; i < 2; i++) {
    const int slab = 2 * warp + i;
    const uint32_t base = (8 * slab + ln.id % 8) * 128;
    float kq[4] = {}, qq[4] = {};
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const uint32_t at =
          base + (n >> 1) * kHalfBytes + (((4 * (n & 1) + ln.id / 8) ^ (ln.id % 8)) << 4);
      uint32_t k[4], q[4];
      ldmatrix_x4(k, smem_u32(k_tile) + at);
      ldmatrix_x4(q, smem_u32(q_tile) + at);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        mma_pairs<E>(kq, k[j], q[j], k[j + 1], q[j + 1], k[j], k[j + 1]);
        mma_pairs<E>(qq, q[j], 0, q[j + 1], 0, q[j], q[j + 1]);
      }
    }
    // The diagonal of 8 x 8 lies in lane 4 g + g / 2.
    const int n = ln.g & 1;
    if (ln.x == ln.g >> 1)
      use(8 * slab + ln.g, n ? kq[1] : kq[0], n ? qq[1] : qq[0], n ? kq[3] : kq[2]);
  }
}
// Row scales and the diagonal of Aqk. In a transfer there are no queries: what stands in their
// place is nobody's, here and in the scores, and is not sent.
template <class E>
__device__ inline void token_norms(Scores& s, const Stage& stage, const uint8_t* k_tile,
                                   const uint8_t* q_tile, const Params& params, int warp,
                                   const Lane& ln) {
  token_diagonals<E>(k_tile, q_tile, warp, ln, [&](int token, float kk, float qq, float qk) {
    const bool is_in = token < stage.item.tokens_left, has_norm = is_in && params.has_norm;
    const float rk = has_norm ? rsqrtf(kk + 1e-6f) : 1.f;
    s.v_scale[token] = has_norm ? (kk + 1e-6f) * rk : 1.f;
    s.row_scale[token] = stage.beta[token] * rk * rk;
    s.o_scale[token] = params.scale * (has_norm ? rsqrtf(qq + 1e-6f) : 1.f);
    if constexpr (kIsHalf<E>) s.k_scale[token] = rk, qk *= rk;
    s.diagonal[token] = is_in ? qk : 0.f;
  });
}

// Two scores of adjacent columns: to L with the columns' scales (warps 0, 1), or to Aqk (warps 2,
// 3).
template <class E>
__device__ inline void put_pair(Scores& s, bool is_q, int row, int col, float a, float b) {
  if (is_q) {
    if constexpr (kIsHalf<E>) a *= s.k_scale[col], b *= s.k_scale[col + 1];
    *reinterpret_cast<uint32_t*>(s.aqk + swizzled(row, col / 8) + 2 * (col % 8)) = pack<E>(a, b);
  } else {
    const int at = kIsHalf<E> ? row : col, next = kIsHalf<E> ? row : col + 1;
    put_operand(&s.l[row * kPitch + col], a * s.row_scale[at], b * s.row_scale[next]);
  }
}

// What a level owns of its 64 x 32 product (32 rows k, 32 rows q), selected, to its place. Levels
// of 1 to 8 tokens (log2 0 to 3): four 8 x 8 blocks on the diagonal, one for each 16 tokens, and in
// these blocks of the level's own size.
template <class E>
__device__ inline void put_local_level(Scores& s, const float (&acc)[16], int log2, int warp,
                                       const Lane& ln) {
  const bool is_q = warp >= 2;
  const int upper = warp & 1, low = (1 << log2) - 1;  // upper: rows 16 .. 31
  const int row = 32 * upper + 2 * (ln.g & ~low) + low + 1 + (ln.g & low);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int c = 2 * ln.x + n, col = 32 * upper + 2 * (c & ~low) + (c & low);
    const uint32_t aqk = smem_u32(s.aqk) + row * 128 + ((2 * col) ^ ((row & 7) << 4));
    const uint32_t l = smem_u32(s.l) + row * (4 * kPitch) + 4 * col;
#pragma unroll
    for (int i = 0; i < 2; i++) {  // 16 tokens on: in aqk bit 5, which neither base nor swizzle has
      float a = upper ? acc[8 + 6 * i + n] : acc[6 * i + n];
      if (!is_q) a *= s.row_scale[16 * i + (kIsHalf<E> ? row : col)];
      if constexpr (kIsHalf<E>)
        if (is_q) a *= s.k_scale[16 * i + col];
      if ((ln.g ^ c) <= low) {
        if (is_q)
          asm volatile("st.shared.b16 [%0], %1;" ::"r"((aqk ^ (32 * i)) + 2048 * i),
                       "h"(uint16_t(pack<E>(a, 0.f)))
                       : "memory");
        else
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(l + i * (64 * kPitch + 64)), "f"(a)
                       : "memory");
      }
    }
  }
}
template <class E>
__device__ inline void put_level16(Scores& s, const float (&acc)[16], int warp, const Lane& ln) {
  const int upper = warp & 1;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = 4 * j + 2 * i;
      put_pair<E>(s, warp >= 2, 32 * upper + 16 + 8 * i + ln.g, 32 * upper + 8 * j + 2 * ln.x,
                  upper ? acc[8 + at] : acc[at], upper ? acc[8 + at + 1] : acc[at + 1]);
    }
}
template <class E>
__device__ inline void put_level32(Scores& s, const float (&acc)[16], int warp, const Lane& ln) {
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      put_pair<E>(s, warp >= 2, 32 + 16 * (warp & 1) + 8 * i + ln.g, 8 * j + 2 * ln.x,
                  acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
}

// To the packet: decays and the factors of v, v_new and o.
template <class E>
__device__ inline void write_factors(const Scores& s, const float (&total)[4][kWidth],
                                     Packet<GateKind::kChannel>& packet) {
  const int tid = thread_index() % kWarpgroup;
  auto& out = packet.body;
  out.decay[decay_place(tid)] = total[0][tid] * (total[1][tid] * total[2][tid] * total[3][tid]);
  if (tid < kChunk) {
    out.v_factor[factor_place(tid)] = kIsHalf<E> ? s.k_scale[tid] : s.v_scale[tid];
    if (!kIsHalf<E>) out.new_factor[factor_place(tid)] = s.row_scale[tid];
  } else {
    packet.o_factor[factor_place(tid - kChunk)] = s.o_scale[tid - kChunk];
  }
}
// T (fp16: with its scales, of rows and columns) as a tile in the inverse's place; zeros above the
// diagonal. The barrier is one that the race checker knows: at a named one it sometimes reports
// these reads and writes (bench/probes/racecheck).
template <class E>
__device__ inline void put_inverse(Scores& s, uint64_t* read, int parity) {
  const int tid = thread_index() % kWarpgroup, col = 4 * (tid % 16);
  uint2 packed[8];
  float4 c = make_float4(1.f, 1.f, 1.f, 1.f);
  if constexpr (kIsHalf<E>) {
    const float4 v = *reinterpret_cast<const float4*>(&s.v_scale[col]);
    c = *reinterpret_cast<const float4*>(&s.row_scale[col]);
    c.x *= v.x, c.y *= v.y, c.z *= v.z, c.w *= v.w;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == 4) asm volatile("" ::: "memory");           // all eight loads at once would spill
    const int row = 8 * i + tid / 16, left = row - col;  // columns up to the diagonal, less one
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
    if (left >= 0) a = *reinterpret_cast<const float4*>(&s.l[row * kPitch + col]);
    if constexpr (kIsHalf<E>) {
      const float v = s.v_scale[row];
      a.x *= v, a.y *= v, a.z *= v, a.w *= v;
    }
    const float x = a.x * c.x, y = left >= 1 ? a.y * c.y : 0.f;
    const float z = left >= 2 ? a.z * c.z : 0.f, w = left >= 3 ? a.w * c.w : 0.f;
    packed[i] = make_uint2(pack<E>(x, y), pack<E>(z, w));
  }
  barrier_arrive(read);
  barrier_wait(read, parity);  // all of the inverse has been read
#pragma unroll
  for (int i = 0; i < 8; i++)
    *reinterpret_cast<uint2*>(s.tile + swizzled(8 * i + tid / 16, col / 8) + 2 * (col % 8)) =
        packed[i];
}

// A level's product, when its operands are there; then their place is free.
template <class E>
__device__ inline void multiply_level(PrepareSmem& s, int level, float (&acc)[16],
                                      bool is_last_item) {
  const int i = level % kLevelBuffers;
  const uint32_t at = smem_u32(&s.level[i]);
  named_sync(kFullBarrier + i, kRowThreads + kScoreThreads);
  const uint64_t a = tile_desc(at, 16, 1024),
                 b = tile_desc(at + offsetof(Level, columns), 16, 1024);
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++)
    wgmma<E, Major::k, Major::k>(acc, desc_at(a, (j / 4) * 8192 + (j % 4) * 32),
                                 desc_at(b, (j / 4) * 4096 + (j % 4) * 32), j > 0);
  wgmma_commit();
  wgmma_wait<0>();
  fence_operands(acc);
  if (level < kLevels - kLevelBuffers || !is_last_item)  // somebody waits for it
    named_arrive(kEmptyBarrier + i, kRowThreads + kScoreThreads);
}

// One warp: where item n is.
__device__ inline void find_item(PrepareSmem& s, const Params& params, int n) {
  const Where w = where_is(
      s, params, params.chunk_prefix, [&](int i) { return span_in_memory(params, i); }, n);
  if (thread_index() % 32 == 0) s.where[n & 1][n / 2 & 1] = w;
  __syncwarp();
}
// One warp: item n but for its tiles. The one after it is looked for while loads are under way.
template <GateForm kForm>
__device__ inline void load_item(PrepareSmem& s, const Params& params, int n, int num_items) {
  Fetched fetched;
  begin_item(s.stage[n & 1], params, s.where[n & 1][n / 2 & 1], fetched);
  if (n + 2 < num_items) find_item(s, params, n + 2);
  finish_item<kForm>(s.stage[n & 1], params, fetched);
  arrive_item(&s.raw_full[n & 1]);
}
// One thread: operands of an item from place st to their packet; the place is free then.
template <bool kQueries>
__device__ inline void send_operands(PrepareSmem& s, Packet<GateKind::kChannel>& to, int st) {
  bulk_store(to.k, s.k[st], kTileBytes);
  if constexpr (kQueries) bulk_store(to.q, s.q[st], kTileBytes);
  bulk_store(to.body.kr, s.g[st], kTileBytes);
  bulk_store_wait_read();
}

// Raw tiles have two places, one for each of the two warpgroups. Only the levels are urgent (their
// buffers are few); what waits for memory comes after them, while the other warpgroup has its turn:
// two warps invert, one looks up and loads numbers, one moves tiles.
template <class E, GateForm kForm, bool kWideGate, bool kQueries>
__device__ inline void prepare_scores(PrepareSmem& s, const Params& params, InputMaps maps,
                                      int num_items) {
  const int which = threadIdx.x / kWarpgroup - 2;
  Scores& sc = s.scores[which];
  for (int i = threadIdx.x % kWarpgroup; i < kHalfBytes / 16; i += kScoreThreads)
    reinterpret_cast<uint4*>(sc.aqk)[i] = uint4{0, 0, 0, 0};
  if (which >= num_items) return;
  auto load_tiles_of = [&](int n) {
    load_tiles<kWideGate, kQueries>(s, maps, s.where[which][n / 2 & 1], which);
  };
  if (threadIdx.x % kWarpgroup >= kTileThread) {
    find_item(s, params, which);
    if (threadIdx.x % 32 == 0) load_tiles_of(which);
    __syncwarp();
    load_item<kForm>(s, params, which, num_items);
  }
  sync_scores(which);  // Aqk is zero, the next item is known
#pragma unroll 1
  for (int n = which; n < num_items; n += 2) {
    const int tid = thread_index() % kWarpgroup, warp = tid / 32;
    const Lane ln(tid);
    const Stage& stage = s.stage[which];
    barrier_wait(&s.raw_full[which], (n / kRawStages) & 1);
    token_norms<E>(sc, stage, s.k[which], s.q[which], params, warp, ln);
    sync_scores(which);  // scales of all tokens; places of T and Aqk are free
    const int carrier = stage.item.carrier, step = stage.item.step;
    const int count = warp == kTileWarp ? packets_read(params, s.plan, carrier) : 0;
    if (warp >= 2) {
      const int token = tid - 64;
      *reinterpret_cast<uint16_t*>(sc.aqk + swizzled(token, token / 8) + 2 * (token % 8)) =
          uint16_t(pack<E>(sc.diagonal[token], 0.f));
    }
    // The other warpgroup has consumed its levels: a parity tells neighbouring phases apart, no
    // more.
    barrier_wait(&s.turn[which], (n / 2 & 1) ^ (which ^ 1));
    float acc[16];
#pragma unroll 1
    for (int l = 0; l < kLevels; l++) {
      multiply_level<E>(s, l, acc, n + 1 == num_items);
      if (l < 4)
        put_local_level<E>(sc, acc, l, warp, ln);
      else if (l == 4)
        put_level16<E>(sc, acc, warp, ln);
      else
        put_level32<E>(sc, acc, warp, ln);
    }
    barrier_arrive(&s.turn[which ^ 1]);
    sync_scores(which);  // L complete
    auto& out = *packet_at<GateKind::kChannel>(params, carrier, step);
    if (warp < 2) {
      invert_in_place(sc.l, which);
    } else if (warp == kNumberWarp) {
      if (n + 2 < num_items) load_item<kForm>(s, params, n + 2, num_items);
    } else {
      barrier_wait(&s.rows_done[which], n / 2 & 1);
      wait_place(params, s.plan, carrier, step, count);
      if (tid == kTileThread) {
        send_operands<kQueries>(s, out, which);
        if (n + 2 < num_items) load_tiles_of(n + 2);
      }
      __syncwarp();
    }
    sync_scores(which);  // the inverse and the rows' totals are complete, the packet's place free
    write_factors<E>(sc, s.total[which], out);
    put_inverse<E>(sc, &s.inverse_read[which], n / 2 & 1);
    fence_async_proxy();
    sync_scores(which);  // T is complete
    if (tid == kTileThread) {
      bulk_store(out.body.solved.t, sc.tile, kHalfBytes);
      if constexpr (kQueries) bulk_store(out.body.solved.aqk, sc.aqk, kHalfBytes);
      publish(params, carrier, step);
    }
    __syncwarp();
  }
}

}  // namespace deltic::gpu::forward
