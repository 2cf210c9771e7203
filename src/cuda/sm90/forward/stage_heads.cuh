// Packets for gates per head, or none: each of the four warpgroups of a preparing CTA prepares
// chunks of its own. Both products come straight from the raw tiles, decays by pairs.
#pragma once
#include "cuda/sm90/forward/stage_scores.cuh"

namespace deltic::gpu::forward {

// k k^T and q k^T, under way on return.
__device__ inline void multiply_pairs(const uint8_t* k_tile, const uint8_t* q_tile, float (&kk)[32],
                                      float (&qk)[32]) {
  const uint64_t k = tile_desc(smem_u32(k_tile), 16, 1024);
  const uint64_t q = tile_desc(smem_u32(q_tile), 16, 1024);
  fence_operands(kk);
  fence_operands(qk);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int at = (j / 4) * kHalf + (j % 4) * 32;
    wgmma<__nv_bfloat16, Major::k, Major::k>(kk, desc_at(k, at), desc_at(k, at), j > 0);
    wgmma<__nv_bfloat16, Major::k, Major::k>(qk, desc_at(q, at), desc_at(k, at), j > 0);
  }
  wgmma_commit();
}

// Rows past the sequence's end belong to someone else: zeros instead. All threads.
__device__ inline void clear_tail(uint8_t* k_tile, uint8_t* q_tile, int rest, int barrier) {
  const int tid = thread_index() % 128, row = tid / 2;
  if (row >= rest)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int at = (i / 4) * kHalf + row * 128 + 64 * (tid % 2) + 16 * (i % 4);
      *reinterpret_cast<uint4*>(k_tile + at) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(q_tile + at) = uint4{0, 0, 0, 0};
    }
  fence_async_proxy();
  named_sync(barrier, 128);  // the tiles are clean
}

// L to shared memory; Aqk as packed pairs, in the order of the accumulators. Of 16 x 16 blocks only
// those on the diagonal are masked, and what lies above is not looked at.
__device__ inline void pair_scores(HeadScores& s, const Stage& stage, const float (&kk)[32],
                                   const float (&qk)[32], uint32_t (&aqk)[16]) {
  const int tid = thread_index() % 128, warp = tid / 32;
  const Lane ln(tid);
  float g[2], bk[2], sq[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = 16 * warp + 8 * i + ln.g;
    g[i] = stage.g_sum[row], bk[i] = stage.beta[row] * s.k_scale[row], sq[i] = s.q_scale[row];
  }
  float* const l = &s.l[(16 * warp + ln.g) * kPitch + 2 * ln.x];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    aqk[2 * j] = aqk[2 * j + 1] = 0;
    if (j < 2 * warp + 2) {
      const float2 c = *reinterpret_cast<const float2*>(&s.column[8 * j + 2 * ln.x]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float px = exp2_approx(g[i] - c.x), py = exp2_approx(g[i] - c.y);
        float lx = kk[4 * j + 2 * i] * px * bk[i], ly = kk[4 * j + 2 * i + 1] * py * bk[i];
        float ax = qk[4 * j + 2 * i] * px * sq[i], ay = qk[4 * j + 2 * i + 1] * py * sq[i];
        if (j >= 2 * warp) {
          const int below = 8 * i + ln.g - (8 * (j & 1) + 2 * ln.x);  // rows below the first column
          lx = below > 0 ? lx : 0.f, ly = below > 1 ? ly : 0.f;
          ax = below >= 0 ? ax : 0.f, ay = below > 0 ? ay : 0.f;
        }
        *reinterpret_cast<float2*>(l + 8 * i * kPitch + 8 * j) = make_float2(lx, ly);
        aqk[2 * j + i] = pack_bf16(ax, ay);
      }
    }
  }
}

// The packet, in place of the inverse. All threads; barriers: of the warpgroup.
__device__ inline void write_packet(HeadScores& s, const Stage& stage, const uint32_t (&aqk)[16],
                                    int barrier) {
  const int tid = thread_index() % 128, col = 4 * (tid % 16);
  uint2 t[8];
  {
    const float4 b = *reinterpret_cast<const float4*>(&stage.beta[col]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = tid / 16 + 8 * i;
      float4 a = make_float4(0.f, 0.f, 0.f, 0.f);  // blocks above the diagonal are not there
      if (col / 16 <= row / 16) a = *reinterpret_cast<const float4*>(&s.l[row * kPitch + col]);
      t[i] = make_uint2(pack_bf16(a.x * b.x, a.y * b.y), pack_bf16(a.z * b.z, a.w * b.w));
    }
  }
  named_sync(barrier, 128);  // the inverse has been read
  auto& out = s.packet.rest;
#pragma unroll
  for (int i = 0; i < 8; i++)
    *reinterpret_cast<uint2*>(out.solved.t + swizzled(tid / 16 + 8 * i, col / 8) + 2 * (col % 8)) =
        t[i];
  const int lane = tid % 32, row = tid / 32 * 16 + (lane & 8) + lane % 8;
#pragma unroll
  for (int j = 0; j < 4; j++)
    stmatrix_x4(smem_u32(out.solved.aqk) + swizzled(row, 2 * j + lane / 16),
                *reinterpret_cast<const uint32_t(*)[4]>(&aqk[4 * j]));
  const float last = stage.g_sum[kChunk - 1];
  if (tid < kChunk) {
    const float to = exp2_approx(stage.g_sum[tid]);
    out.ks_factor[factor_place(tid)] = to * s.k_scale[tid];
    out.qs_factor[factor_place(tid)] = to * s.q_scale[tid];
  } else if (tid < 96) {
    const int c = 2 * (tid - kChunk);
    out.v_new_factor[pair_place(c)] =
        pack_bf16(exp2_approx(last - stage.g_sum[c]) * s.k_scale[c],
                  exp2_approx(last - stage.g_sum[c + 1]) * s.k_scale[c + 1]);
  } else if (tid < 100) {
    out.decay[tid - 96] = exp2_approx(last);
  }
  fence_async_proxy();
  named_sync(barrier, 128);  // the packet is complete
}

__device__ inline void prepare_heads(HeadSmem& s, const Params& params, InputMaps maps,
                                     int num_items) {
  const int st = threadIdx.x / 128, barrier = 1 + st;
  HeadScores& sc = s.scores[st];
  const bool has_tables = s.plan.num_pieces <= kTablePieces;
  const int* const prefix = has_tables ? s.prefix : params.chunk_prefix;
  auto span_of = [&](int i) { return has_tables ? s.spans[i] : span_in_memory(params, i); };
  auto is_item = [&](int i) { return st + i * kHeadGroups < num_items; };
  // A warp: where item i of this warpgroup is.
  auto find = [&](int i) {
    if (is_item(i)) {
      const Where w = where_is(s, params, prefix, span_of, st + i * kHeadGroups);
      if (thread_index() % 32 == 0) s.where[st][i & 1] = w;
    }
    __syncwarp();
  };
  auto finish_rows = [&](int i, const Fetched& fetched) {
    if (is_item(i)) {
      finish_head_item(s.stage[st][i & 1], params, fetched);
      arrive_item(&s.raw_full[st]);
    }
  };
  if (threadIdx.x % 128 < kChunk)
    sc.k_scale[threadIdx.x % 128] = 1.f, sc.q_scale[threadIdx.x % 128] = params.scale;
  if (threadIdx.x % 128 >= 96 && st < num_items) {
    find(0);
    if (threadIdx.x % 32 == 0) load_tiles<GateKind::kHead, false>(s, maps, s.where[st][0], st);
    __syncwarp();
    Fetched fetched;
    begin_item<GateKind::kHead>(s.stage[st][0], params, s.where[st][0], fetched);
    finish_rows(0, fetched);
    find(1);
  }
  uint32_t* ready = nullptr;
  int step = 0;
  auto publish = [&] {  // the packet before: its copy out began an item ago
    if (thread_index() % 128 == 64 && ready) {
      bulk_store_wait();
      store_release(ready, step + 1);
    }
    __syncwarp();
  };
#pragma unroll 1
  for (int n = st, i = 0; n < num_items; n += kHeadGroups, i++) {
    const int tid = thread_index() % 128;
    const Stage& stage = s.stage[st][i & 1];
    barrier_wait(&s.raw_full[st], i & 1);
    if (stage.item.rest < kChunk) clear_tail(s.k[st], s.q[st], stage.item.rest, barrier);
    if (params.has_norm)
      head_norms(sc, stage, s.k[st], s.q[st], params.scale, tid / 32, Lane(tid));
    else if (tid < kChunk)
      sc.column[tid] = stage.g_sum[tid];
    uint32_t aqk[16];
    Fetched fetched;  // the last warp's, for the next item
    {
      float kk[32], qk[32];
      multiply_pairs(s.k[st], s.q[st], kk, qk);
      if (tid == 64) tensor_store_wait_read();
      __syncwarp();
      wgmma_wait<0>();
      fence_operands(kk);
      fence_operands(qk);
      named_sync(barrier, 128);  // scales of all tokens; tiles and the packet before are read
      if (tid == 0 && n + kHeadGroups < num_items)  // its warp has the fewest pairs
        load_tiles<GateKind::kHead, false>(s, maps, s.where[st][(i + 1) & 1], st);
      if (tid >= 96 && is_item(i + 1))
        begin_item<GateKind::kHead>(s.stage[st][(i + 1) & 1], params, s.where[st][(i + 1) & 1],
                                    fetched);
      __syncwarp();
      pair_scores(sc, stage, kk, qk, aqk);
    }
    named_sync(barrier, 128);  // L complete
    if (tid < 96) {
      if (tid >= 64) publish();
      __syncwarp();
      invert(sc.l, barrier + kHeadGroups);
    } else {
      finish_rows(i + 1, fetched);
      find(i + 2);
    }
    named_sync(barrier, 128);  // the inverse is complete
    write_packet(sc, stage, aqk, barrier);
    ready = stage.item.ready, step = stage.item.step;
    if (tid == 64) {
      const int over = step - params.ring_slots;
      if (over >= 0) {  // the packet's place has been read by its carrier
        wait_flag<false>(stage.item.consumed, over + 1);
        if (params.is_transfer) wait_flag<false>(stage.item.consumed + 32, over + 1);
      }
      bulk_store(stage.item.packet, &sc.packet, kRestBytes<GateKind::kHead>);
    }
    __syncwarp();
  }
  if (threadIdx.x % 128 >= 64) publish();
}

}  // namespace deltic::gpu::forward
