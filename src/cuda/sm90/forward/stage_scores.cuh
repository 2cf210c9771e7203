// Norms, scores and the inverse of a chunk (warpgroups 2 and 3 of a preparing CTA, every other
// chunk each). chunk::Lane = 4 g + x as in the accumulators of mma: rows g, g + 8, columns 2x, 2x
// + 1.
#pragma once
#include <cstddef>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/stage_load.cuh"

namespace deltic::gpu::forward {

__device__ inline void sync_scores(int which) {
  chunk::sync_own<kScoreBarrier, kScoreThreads>(which);
}

// Row scales and the diagonal of Aqk. In a transfer there are no queries: what stands in their
// place is nobody's, here and in the scores, and is not sent.
template <class E>
__device__ inline void token_norms(chunk::Scores& s, const Stage& stage, const uint8_t* k_tile,
                                   const uint8_t* q_tile, const Params& params, int warp,
                                   const chunk::Lane& ln) {
  chunk::token_diagonals<E>(k_tile, q_tile, warp, ln, [&](int token, float kk, float qq, float qk) {
    const bool is_in = token < stage.item.tokens_left, has_norm = is_in && params.has_norm;
    const float rk = has_norm ? rsqrtf(kk + 1e-6f) : 1.f;
    s.v_scale[token] = has_norm ? (kk + 1e-6f) * rk : 1.f;
    s.row_scale[token] = stage.beta[token] * rk * rk;
    s.o_scale[token] = params.scale * (has_norm ? rsqrtf(qq + 1e-6f) : 1.f);
    if constexpr (kIsHalf<E>) s.k_scale[token] = rk, qk *= rk;
    s.diagonal[token] = is_in ? qk : 0.f;
  });
}

// To the packet: decays and the factors of v, v_new and o.
template <class E>
__device__ inline void write_factors(const chunk::Scores& s, const float (&total)[4][kWidth],
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
// A level's product, when its operands are there; then their place is free.
template <class E>
__device__ inline void multiply_level(PrepareSmem& s, int level, float (&acc)[16],
                                      bool is_last_item) {
  const int i = level % kLevelBuffers;
  const uint32_t at = smem_u32(&s.level[i]);
  named_sync(kFullBarrier + i, kRowThreads + kScoreThreads);
  const uint64_t a = tile_desc(at, 16, 1024),
                 b = tile_desc(at + offsetof(chunk::Level, columns), 16, 1024);
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
template <deltic_gate_form kForm>
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
template <class E, deltic_gate_form kForm, bool kWideGate, bool kQueries>
__device__ inline void prepare_scores(PrepareSmem& s, const Params& params, InputMaps maps,
                                      int num_items) {
  const int which = threadIdx.x / kWarpgroup - 2;
  chunk::Scores& sc = s.scores[which];
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
    const chunk::Lane ln(tid);
    const Stage& stage = s.stage[which];
    barrier_wait(&s.raw_full[which], (n / kRawStages) & 1);
    token_norms<E>(sc, stage, s.k[which], s.q[which], params, warp, ln);
    sync_scores(which);  // scales of all tokens; places of T and Aqk are free
    const int carrier = stage.item.carrier, step = stage.item.step;
    const int count = warp == kTileWarp ? packets_read(params, s.seat.plan, carrier) : 0;
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
        chunk::put_local_level<E>(sc, acc, l, warp, ln);
      else if (l == 4)
        chunk::put_level16<E>(sc, acc, warp, ln);
      else
        chunk::put_level32<E>(sc, acc, warp, ln);
    }
    barrier_arrive(&s.turn[which ^ 1]);
    sync_scores(which);  // L complete
    auto& out = *packet_at<GateKind::kChannel>(params, carrier, step);
    if (warp < 2) {
      chunk::invert_in_place<kInvertBarrier>(sc.l, which);
    } else if (warp == kNumberWarp) {
      if (n + 2 < num_items) load_item<kForm>(s, params, n + 2, num_items);
    } else {
      barrier_wait(&s.rows_done[which], n / 2 & 1);
      wait_place(params, s.seat.plan, carrier, step, count);
      if (tid == kTileThread) {
        send_operands<kQueries>(s, out, which);
        if (n + 2 < num_items) load_tiles_of(n + 2);
      }
      __syncwarp();
    }
    sync_scores(which);  // the inverse and the rows' totals are complete, the packet's place free
    write_factors<E>(sc, s.total[which], out);
    chunk::put_inverse<E>(sc, &s.inverse_read[which], n / 2 & 1);
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
