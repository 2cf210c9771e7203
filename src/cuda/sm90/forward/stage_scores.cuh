// Norms, scores and the inverse of a chunk (warpgroups 2 and 3 of a preparing CTA, every other
// chunk each). Lane = 4 g + x as in the accumulators of mma: rows g, g + 8, columns 2x, 2x + 1.
#pragma once
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/stage_invert.cuh"
#include "cuda/sm90/forward/stage_load.cuh"

namespace deltic::gpu::forward {

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
          base + (n >> 1) * kHalf + (((4 * (n & 1) + ln.id / 8) ^ (ln.id % 8)) << 4);
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
// Row scales and the diagonal of Aqk.
template <class E>
__device__ inline void token_norms(Scores& s, const Stage& stage, const uint8_t* k_tile,
                                   const uint8_t* q_tile, const Params& params, int warp,
                                   const Lane& ln) {
  token_diagonals<E>(k_tile, q_tile, warp, ln, [&](int token, float kk, float qq, float qk) {
    const bool is_in = token < stage.item.rest, has_norm = is_in && params.has_norm;
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
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int base = 32 * upper + 16 * i, row = base + 2 * (ln.g & ~low) + low + 1 + (ln.g & low);
    const uint32_t aqk = smem_u32(s.aqk) + row * 128, l = smem_u32(s.l) + row * (4 * kPitch);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int c = 2 * ln.x + n, col = base + 2 * (c & ~low) + (c & low);
      float a = upper ? acc[8 + 6 * i + n] : acc[6 * i + n];
      if (!is_q) a *= s.row_scale[kIsHalf<E> ? row : col];
      if constexpr (kIsHalf<E>)
        if (is_q) a *= s.k_scale[col];
      if ((ln.g ^ c) <= low) {
        if (is_q)
          asm volatile("st.shared.b16 [%0], %1;" ::"r"(aqk + ((2 * col) ^ ((row & 7) << 4))),
                       "h"(uint16_t(pack<E>(a, 0.f)))
                       : "memory");
        else
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(l + 4 * col), "f"(a) : "memory");
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
  const int tid = thread_index() % 128;
  auto& out = packet.rest;
  out.decay[decay_place(tid)] = total[0][tid] * (total[1][tid] * total[2][tid] * total[3][tid]);
  if (tid < kChunk) {
    out.v_factor[factor_place(tid)] = kIsHalf<E> ? s.k_scale[tid] : s.v_scale[tid];
    if (!kIsHalf<E>) packet.new_factor[factor_place(tid)] = s.row_scale[tid];
  } else {
    out.o_factor[factor_place(tid - kChunk)] = s.o_scale[tid - kChunk];
  }
}
// T (fp16: with its scales, of rows and columns) as a tile in the inverse's place; zeros above the
// diagonal. barrier: of the 128 threads.
template <class E>
__device__ inline void put_inverse(Scores& s, int barrier) {
  const int tid = thread_index() % 128, col = 4 * (tid % 16);
  uint2 packed[8];
  float4 c = make_float4(1.f, 1.f, 1.f, 1.f);
  if constexpr (kIsHalf<E>) {
    const float4 v = *reinterpret_cast<const float4*>(&s.v_scale[col]);
    c = *reinterpret_cast<const float4*>(&s.row_scale[col]);
    c.x *= v.x, c.y *= v.y, c.z *= v.z, c.w *= v.w;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == 4) asm volatile("" ::: "memory");  // as loads before it would spill
    const int row = 8 * i + tid / 16, left = row - col;  // columns up to the diagonal, less one
    float4 a = *reinterpret_cast<const float4*>(&s.l[row * kPitch + col]);
    if constexpr (kIsHalf<E>) {
      const float v = s.v_scale[row];
      a.x *= v, a.y *= v, a.z *= v, a.w *= v;
    }
    const float x = left >= 0 ? a.x * c.x : 0.f, y = left >= 1 ? a.y * c.y : 0.f;
    const float z = left >= 2 ? a.z * c.z : 0.f, w = left >= 3 ? a.w * c.w : 0.f;
    packed[i] = make_uint2(pack<E>(x, y), pack<E>(z, w));
  }
  named_sync(barrier, kScoreThreads);  // all of the inverse has been read
#pragma unroll
  for (int i = 0; i < 8; i++)
    *reinterpret_cast<uint2*>(s.tile + swizzled(8 * i + tid / 16, col / 8) + 2 * (col % 8)) =
        packed[i];
}

// A level's product, when its operands are there.
template <class E>
__device__ inline void multiply_level(PrepareSmem& s, int level, float (&acc)[16]) {
  const int i = level % kLevelBuffers;
  barrier_wait(&s.level_full[i], level / kLevelBuffers & 1);
  const uint64_t a = tile_desc(smem_u32(s.level[i].rows), 16, 1024);
  const uint64_t b = tile_desc(smem_u32(s.level[i].columns), 16, 1024);
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++)
    wgmma<E, Major::k, Major::k>(acc, desc_at(a, (j / 4) * 8192 + (j % 4) * 32),
                                 desc_at(b, (j / 4) * 4096 + (j % 4) * 32), j > 0);
  wgmma_commit();
  wgmma_wait<0>();
  fence_operands(acc);
  barrier_arrive(&s.level_empty[i]);
}

// One warp: where item n is, for load_channel_item.
__device__ inline void find_channel_item(PrepareSmem& s, const Params& params, int n, int st) {
  const Where w = where_is(
      s, params, params.chunk_prefix, [&](int i) { return span_in_memory(params, i); }, n);
  if (thread_index() % 32 == 0) s.where[st] = w;
  __syncwarp();
}
// The same warp: begins to load item n into place st, from which the operands of the one before, if
// there is one, go to their packet. The next one's place is looked up while copies are under way.
template <bool kIsFirst, bool kWideGate>
__device__ inline void begin_channel_item(PrepareSmem& s, const Params& params,
                                          const InputMaps& maps, int n, int st, int num_items,
                                          Fetched& fetched) {
  const Where w = s.where[st];
  const bool is_first = thread_index() % 32 == 0, is_item = n < num_items;
  if constexpr (!kIsFirst) {
    barrier_wait(&s.rows_done[st], (n / 2 - 1) & 1);
    if (is_first) {
      const Item& item = s.stage[st].item;
      wait_place(params, s.plan, item.carrier, item.step);  // the carrier has read what was there
      auto* const to = packet_at<GateKind::kChannel>(params, item.carrier, item.step);
      bulk_store(to->keys.k, s.k[st], kTile);
      bulk_store(to->keys.q, s.q[st], kTile);
      bulk_store(to->rest.kr, s.g[st], kTile);
    }
    __syncwarp();
  }
  if (is_item) begin_item(s.stage[st], params, w, fetched);
  if (n + 2 < num_items) find_channel_item(s, params, n + 2, st);
  if (!kIsFirst && is_first) tensor_store_wait_read();
  if (is_first && is_item) load_tiles<kWideGate>(s, maps, w, st);
  __syncwarp();
}

// Raw tiles have two places, one for each of the two warpgroups, whose last warp fills it. Only the
// levels are urgent (their buffers are few); what waits for memory comes after them, while the
// other warpgroup has its turn.
template <class E, GateForm kForm, bool kWideGate>
__device__ inline void prepare_scores(PrepareSmem& s, const Params& params, InputMaps maps,
                                      int num_items) {
  const int which = threadIdx.x / 128 - 2, barrier = 2 + which;
  Scores& sc = s.scores[which];
  for (int i = threadIdx.x % 128; i < kHalf / 16; i += kScoreThreads)
    reinterpret_cast<uint4*>(sc.aqk)[i] = uint4{0, 0, 0, 0};
  named_sync(barrier, kScoreThreads);
  Fetched fetched;
  auto finish_item = [&](int n) {
    if (n >= num_items) return;
    finish_channel_item<kForm>(s.stage[which], params, fetched);
    arrive_item(&s.raw_full[which]);
  };
  if (threadIdx.x % 128 >= 96 && which < num_items) {
    find_channel_item(s, params, which, which);
    begin_channel_item<true, kWideGate>(s, params, maps, which, which, num_items, fetched);
    finish_item(which);
  }
#pragma unroll 1
  for (int n = which; n < num_items; n += 2) {
    const int st = which, tid = thread_index() % 128, warp = tid / 32;
    const Lane ln(tid);
    const Stage& stage = s.stage[st];
    barrier_wait(&s.raw_full[st], (n / kRawStages) & 1);
    const int carrier = stage.item.carrier, step = stage.item.step;
    token_norms<E>(sc, stage, s.k[st], s.q[st], params, warp, ln);
    named_sync(barrier, kScoreThreads);  // scales of all tokens; T and Aqk before are out
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
    for (int l = 0; l < 4; l++) {
      multiply_level<E>(s, l, acc);
      put_local_level<E>(sc, acc, l, warp, ln);
    }
    multiply_level<E>(s, 4, acc);
    put_level16<E>(sc, acc, warp, ln);
    multiply_level<E>(s, 5, acc);
    put_level32<E>(sc, acc, warp, ln);
    barrier_arrive(&s.turn[which ^ 1]);
    named_sync(barrier, kScoreThreads);  // L complete
    if (tid < 96)
      invert_in_place(sc.l, barrier + 2);
    else
      begin_channel_item<false, kWideGate>(s, params, maps, n + 2, st, num_items, fetched);
    named_sync(barrier, kScoreThreads);  // the inverse is complete, the packet's place free
    auto& out = *packet_at<GateKind::kChannel>(params, carrier, step);
    write_factors<E>(sc, s.total[which], out);
    put_inverse<E>(sc, barrier);
    fence_async_proxy();
    named_sync(barrier, kScoreThreads);  // T is complete
    if (warp == 3) {
      if (tid == 96) {
        bulk_store(out.rest.solved.t, sc.tile, kHalf);
        bulk_store(out.rest.solved.aqk, sc.aqk, kHalf);
      }
      __syncwarp();
      finish_item(n + 2);
      if (tid == 96) {
        bulk_store_wait();
        store_release(ready_flag(params, carrier, step), step + 1);
      }
      __syncwarp();
    }
  }
}

}  // namespace deltic::gpu::forward
