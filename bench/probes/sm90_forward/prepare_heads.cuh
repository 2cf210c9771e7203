// Packets for gates per head, or none: each of the four warpgroups of a preparing CTA prepares
// chunks of its own. Both products come straight from the raw tiles, decays by pairs.
#pragma once
#include "prepare_scores.cuh"

namespace deltic::gpu {

// L to shared memory, Aqk to the packet.
__device__ inline void pair_scores(HeadScores& s, const Stage& stage, const uint8_t* k_tile,
                                   const uint8_t* q_tile, Packet* out) {
  const int tid = thread_index() % 128, warp = tid / 32;
  const Lane ln(tid);
#pragma unroll 1
  for (int is_q = 0; is_q < 2; is_q++) {
    float acc[32];
    const uint64_t a = tile_desc(smem_u32(is_q ? q_tile : k_tile), 16, 1024);
    const uint64_t b = tile_desc(smem_u32(k_tile), 16, 1024);
    fence_operands(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int at = (j / 4) * kHalf + (j % 4) * 32;
      wgmma<ScoreN64>(acc, desc_at(a, at), desc_at(b, at), j > 0);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence_operands(acc);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 16 * warp + 8 * i + ln.g;
      const float g = stage.g_sum[row], f = is_q ? 1.f : s.row_scale[row];
      const bool is_in = row < stage.item.rest;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int col = 8 * j + 2 * ln.x;
        const float2 c = *reinterpret_cast<const float2*>(&stage.g_sum[col]);
        const float x = acc[4 * j + 2 * i] * exp2_approx(g - c.x) * f;
        const float y = acc[4 * j + 2 * i + 1] * exp2_approx(g - c.y) * f;
        const float u = is_in && row >= col + 1 - is_q ? x : 0.f;
        const float w = is_in && row >= col + 2 - is_q ? y : 0.f;
        if (is_q)
          *reinterpret_cast<uint32_t*>(out->rest.aqk + swizzled(row, j) + 4 * ln.x) =
              pack_bf16(u, w);
        else
          *reinterpret_cast<float2*>(&s.l[row * kPitch + col]) = make_float2(u, w);
      }
    }
  }
}
// k exp(G), q exp(G), k exp(G_last - G) and the chunk's decay.
__device__ inline void head_rows(const Stage& stage, const uint8_t* k_tile, const uint8_t* q_tile,
                                 Packet* out) {
  const int tid = thread_index() % 128, half = tid / 32 & 1, first = 32 * (tid / 64);
  const uint32_t lane4 = 4 * (tid % 32);
#pragma unroll 8
  for (int i = 0; i < 32; i++) {
    const int t = first + i;
    const uint32_t at = half * kHalf + t * 128 + (lane4 ^ ((t & 7) << 4));
    uint32_t k = *reinterpret_cast<const uint32_t*>(k_tile + at);
    uint32_t q = *reinterpret_cast<const uint32_t*>(q_tile + at);
    if (t >= stage.item.rest) k = q = 0;
    const uint32_t f = stage.f[t];
    store_packet(out->keys.kd + at, mul_bf16x2(k, f));
    store_packet(out->keys.qd + at, mul_bf16x2(q, f));
    store_packet(out->rest.kr + at, mul_bf16x2(k, stage.h[t]));
  }
  out->rest.decay[tid] = exp2_approx(stage.g_sum[kChunk - 1]);
}

template <Gate kGate, GateForm kForm>
__device__ inline void prepare_heads(HeadSmem& s, const Params& params, InputMaps maps,
                                     int num_items) {
  const int st = threadIdx.x / 128, barrier = 1 + st;
  HeadScores& sc = s.scores[st];
  const Stage& stage = s.stage[st];
  auto wait_place = [&](int n) {  // the packet's place has been read by its carrier
    if (threadIdx.x % 128 == 64 && n < num_items) {
      const int over = stage.item.step - params.ring_slots;
      if (over >= 0) {
        wait_flag<false>(stage.item.consumed, over + 1);
        if (params.is_transfer) wait_flag<false>(stage.item.consumed + 32, over + 1);
      }
    }
    __syncwarp();
  };
  auto load = [&](int n) {  // the last warp
    if (n < num_items) {
      Fetched fetched;
      begin_item<kGate, kForm>(s, params, maps, n, st, fetched);
      finish_item<kGate, kForm>(s, params, st, fetched);
    }
    __syncwarp();
  };
  if (threadIdx.x % 128 >= 96) load(st);
  named_sync(barrier, 128);  // the item is known
  wait_place(st);
#pragma unroll 1
  for (int n = st; n < num_items; n += kHeadGroups) {
    const int tid = thread_index() % 128;
    barrier_wait(&s.raw_full[st], (n / kHeadGroups) & 1);
    Packet* const out = stage.item.packet;
    uint32_t* const ready = stage.item.ready;
    const int step = stage.item.step;
    token_norms(sc, stage, s.k[st], s.q[st], params.scale, tid / 32, Lane(tid));
    named_sync(barrier, 128);  // scales of all tokens; the packet's place is free
    pair_scores(sc, stage, s.k[st], s.q[st], out);
    head_rows(stage, s.k[st], s.q[st], out);
    named_sync(barrier, 128);  // L complete, raw tiles and stage read
    if (tid < 96)
      invert(sc.l, barrier + kHeadGroups);
    else
      load(n + kHeadGroups);
    named_sync(barrier, 128);  // the inverse is complete
    write_inverse(sc, out);
    named_sync(barrier, 128);  // all of the packet is written; the next item is known
    if (tid == 96) store_release(ready, step + 1);
    wait_place(n + kHeadGroups);
  }
}

}  // namespace deltic::gpu
