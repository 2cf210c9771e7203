// Packets for gates per head, or none: each of the four warpgroups of a preparing CTA prepares
// chunks of its own. Both products come straight from the raw tiles.
#pragma once
#include "cuda/sm90/forward/stage_scores.cuh"

namespace deltic::gpu::forward {

// k k^T and q k^T, under way on return.
template <class E>
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
    wgmma<E, Major::k, Major::k>(kk, desc_at(k, at), desc_at(k, at), j > 0);
    wgmma<E, Major::k, Major::k>(qk, desc_at(q, at), desc_at(k, at), j > 0);
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

// What scores need of one token; x: |k|^2 where keys are normalised.
__device__ inline void put_token(HeadScores& to, const float* g_sum, int t, bool has_norm,
                                 float x) {
  const float scale = has_norm ? rsqrtf(x + 1e-6f) : 1.f, g = g_sum[t];
  to.k_scale[t] = scale;
  to.column[t] = g + (has_norm ? .5f * log2_approx(x + 1e-6f) : 0.f);
  to.to_end[t] = exp2_approx(g_sum[t | 15] - g) * scale;
  to.from_start[t] = t < 16 ? 1.f : exp2_approx(g - g_sum[(t & ~15) - 1]);
}
// The same from the diagonal of k k^T.
__device__ inline void put_tokens(HeadScores& s, const Stage& stage, const float (&kk)[32]) {
  const int tid = thread_index() % 128, warp = tid / 32;
  const Lane ln(tid);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++)
      if (w == warp) x = ln.g & 1 ? kk[8 * w + 6 * i + 1] : kk[8 * w + 6 * i];
    const int token = 16 * warp + 8 * i + ln.g;
    if (ln.x == ln.g >> 1) put_token(s, stage.g_sum, token, token < stage.item.rest, x);
  }
}

// M beta to shared memory; Aqk as packed pairs of 16 x 16 blocks, in the order of the accumulators.
// Left of the diagonal's block a decay is a product of three, each at most 1: to the end of the
// columns' 16 tokens, from there, from the start of the rows' 16. What lies above is not looked at.
template <class E>
__device__ inline void pair_scores(HeadScores& s, const Stage& stage, const float (&kk)[32],
                                   const float (&qk)[32], uint32_t (&aqk)[16]) {
  const int tid = thread_index() % 128, warp = tid / 32, row = 16 * warp + tid % 32 / 4;
  const Lane ln(tid);
  float sk[2], sq[2], from[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = row + 8 * i;
    sk[i] = s.k_scale[r], sq[i] = s.q_scale[r], from[i] = s.from_start[r];
  }
  float* const l = &s.l[row * kPitch + 2 * ln.x];
#pragma unroll
  for (int i = 0; i < 16; i++) aqk[i] = 0;
#pragma unroll
  for (int b = 0; b < 4; b++)
    if (b < warp) {
      const float between = exp2_approx(stage.g_sum[16 * warp - 1] - stage.g_sum[16 * b + 15]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = 16 * b + 8 * j + 2 * ln.x;
        const float2 c = *reinterpret_cast<const float2*>(&s.to_end[col]);
        const float2 beta = *reinterpret_cast<const float2*>(&stage.beta[col]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int n = 8 * b + 4 * j + 2 * i;
          const float f = from[i] * between, x = c.x * f, y = c.y * f;
          put_operand(l + 8 * i * kPitch + 16 * b + 8 * j, kk[n] * x * (sk[i] * beta.x),
                      kk[n + 1] * y * (sk[i] * beta.y));
          aqk[n / 2] = pack<E>(qk[n] * x * sq[i], qk[n + 1] * y * sq[i]);
        }
      }
    } else if (b == warp) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = 16 * b + 8 * j + 2 * ln.x;
        const float2 c = *reinterpret_cast<const float2*>(&s.column[col]);
        const float2 beta = *reinterpret_cast<const float2*>(&stage.beta[col]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int n = 8 * b + 4 * j + 2 * i;
          const float g = stage.g_sum[row + 8 * i];
          const float x = exp2_approx(g - c.x), y = exp2_approx(g - c.y);
          const int below = 8 * i + ln.g - (8 * j + 2 * ln.x);  // rows below the first column
          *reinterpret_cast<float2*>(l + 8 * i * kPitch + 16 * b + 8 * j) =
              make_float2(below > 0 ? kk[n] * x * (sk[i] * beta.x) : 0.f,
                          below > 1 ? kk[n + 1] * y * (sk[i] * beta.y) : 0.f);
          aqk[n / 2] = pack<E>(below >= 0 ? qk[n] * x * sq[i] : 0.f,
                               below > 0 ? qk[n + 1] * y * sq[i] : 0.f);
        }
      }
    }
}

// T in place of the inverse; both halves of it are there. Warps 0 and 1 have
// two blocks below the diagonal's each, 2 and 3 three on it and the empty ones. barrier: of the
// warpgroup.
template <class E>
__device__ inline void write_solved(HeadScores& s, int barrier) {
  const int warp = thread_index() % 128 / 32;
  const Lane ln(thread_index());
  auto place_of_block = [&](int n, int& i, int& j) {
    if (warp < 2)
      i = 3 - warp, j = n;
    else
      i = 2 * warp - 4 + (n > 0), j = 2 * warp - 4 + (n > 1);
  };
  Block b[3] = {};
  if (warp < 2) {
    Block z[2];
    invert_corner(s.l, 3 - warp, ln, z);
#pragma unroll
    for (int i = 0; i < 8; i++)
      b[0].m[i / 4][i % 4] = -z[0].m[i / 4][i % 4], b[1].m[i / 4][i % 4] = -z[1].m[i / 4][i % 4];
  } else {
#pragma unroll
    for (int n = 0; n < 3; n++) {
      int i, j;
      place_of_block(n, i, j);
      b[n] = load_block(block_at(s.l, i, j), ln);
    }
  }
  named_sync(barrier, 128);  // L and the inverse have been read
  uint8_t* const out = s.packet.rest.solved.t;
  auto put = [&](int i, int j, const Block& x) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int m = 0; m < 2; m++)
        *reinterpret_cast<uint32_t*>(out + swizzled(16 * i + 8 * m + ln.g, 2 * j + n) + 4 * ln.x) =
            pack<E>(x.m[n][2 * m], x.m[n][2 * m + 1]);
  };
#pragma unroll
  for (int n = 0; n < 3; n++) {
    int i, j;
    place_of_block(n, i, j);
    if (n < 2 || warp >= 2) put(i, j, b[n]);
  }
  if (warp >= 2)  // above the diagonal: (0, 1), (0, 2), (0, 3); (1, 2), (1, 3), (2, 3)
#pragma unroll
    for (int n = 0; n < 3; n++)
      put(warp == 2 ? 0 : 1 + (n == 2), warp == 2 ? n + 1 : n == 0 ? 2 : 3, Block{});
}
// The rest of the packet. All threads; barrier: of the warpgroup.
template <class E>
__device__ inline void write_packet(HeadScores& s, const Stage& stage, const uint32_t (&aqk)[16],
                                    int barrier) {
  const int tid = thread_index() % 128, lane = tid % 32;
  const int row = tid / 32 * 16 + (lane & 8) + lane % 8;
  auto& out = s.packet.rest;
#pragma unroll
  for (int j = 0; j < 4; j++)
    stmatrix_x4(smem_u32(out.solved.aqk) + swizzled(row, 2 * j + lane / 16),
                *reinterpret_cast<const uint32_t(*)[4]>(&aqk[4 * j]));
  const float last = stage.g_sum[kChunk - 1];
  if (tid < kChunk) {
    const float to = exp2_approx(stage.g_sum[tid]);
    out.ks_factor[factor_place(tid)] = to * s.k_scale[tid];
    out.qs_factor[factor_place(tid)] = to * s.q_scale[tid];
    out.new_factor[factor_place(tid)] = stage.beta[tid];
  } else if (tid < 96) {
    const int c = 2 * (tid - kChunk);
    const float x = exp2_approx(last - stage.g_sum[c]) * s.k_scale[c];
    const float y = exp2_approx(last - stage.g_sum[c + 1]) * s.k_scale[c + 1];
    if constexpr (kIsHalf<E>) {
      *reinterpret_cast<float2*>(&out.v_new_factor[0][0] + factor_place(c)) = make_float2(x, y);
    } else {
      const uint32_t high = pack_bf16(x, y);
      out.v_new_factor[0][pair_place(c)] = high;
      out.v_new_factor[1][pair_place(c)] = pack_bf16(x - bf16_lo(high), y - bf16_hi(high));
    }
  } else if (tid == 96) {
    out.decay = exp2_approx(last);
  }
  fence_async_proxy();
  named_sync(barrier, 128);  // the packet is complete
}

template <class E>
__device__ inline void prepare_heads(HeadSmem& s, const Params& params, InputMaps maps,
                                     int num_items) {
  // Which warpgroup, read anew: else dozens of addresses are kept, and spilled.
  auto st = [] { return thread_index() / 128; };
  auto scores = [&]() -> HeadScores& { return s.scores[st()]; };
  auto barrier = [&] { return 1 + st(); };
  const bool has_tables = s.plan.num_pieces <= kTablePieces;
  const int* const prefix = has_tables ? s.prefix : params.chunk_prefix;
  auto span_of = [&](int i) { return has_tables ? s.spans[i] : span_in_memory(params, i); };
  auto is_item = [&](int i) { return st() + i * kHeadGroups < num_items; };
  // A warp: where item i of this warpgroup is.
  auto find = [&](int i) {
    if (is_item(i)) {
      const Where w = where_is(s, params, prefix, span_of, st() + i * kHeadGroups);
      if (thread_index() % 32 == 0) s.where[st()][i & 1] = w;
    }
    __syncwarp();
  };
  // The same warp: its gates and beta, under way on return.
  auto fetch = [&](int i, float2(&row)[2]) {
    const Where& w = s.where[st()][i & 1];
    const int lane = thread_index() % 32;
    const float2* const from =
        params.head_rows + (int64_t(w.head) * params.num_batches + w.batch) * params.num_tokens +
        w.token + 2 * lane;
#pragma unroll
    for (int n = 0; n < 2; n++)  // past the end: no decay, beta 0
      row[n] = 2 * lane + n < w.rest ? __ldcg(from + n) : make_float2(0.f, 0.f);
  };
  auto finish = [&](int i, const float2(&row)[2]) {
    if (!is_item(i)) return;
    Stage& stage = s.stage[st()][i & 1];
    const int lane = thread_index() % 32;
    if (lane == 0) stage.item = item_of<GateKind::kHead>(params, s.where[st()][i & 1]);
    float sum = row[0].x + row[1].x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float x = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += x;
    }
    const float before = __shfl_up_sync(~0u, sum, 1);
    *reinterpret_cast<float2*>(&stage.g_sum[2 * lane]) =
        make_float2((lane ? before : 0.f) + row[0].x, sum);
    *reinterpret_cast<float2*>(&stage.beta[2 * lane]) = make_float2(row[0].y, row[1].y);
    arrive_item(&s.raw_full[st()]);
  };
  auto load_tiles = [&](int i) {  // the carrier reads them again
    const Where w = s.where[st()][i & 1];
    uint64_t* bar = &s.raw_full[st()];
    barrier_expect(bar, 2 * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      tensor_load<kEvictNormal>(s.k[st()] + h * kHalf, maps.k, 64 * h, w.qk_head, w.token, w.batch,
                                bar);
      tensor_load<kEvictNormal>(s.q[st()] + h * kHalf, maps.q, 64 * h, w.qk_head, w.token, w.batch,
                                bar);
    }
  };
  if (threadIdx.x % 128 < kChunk) scores().q_scale[threadIdx.x % 128] = params.scale;
  if (threadIdx.x % 128 >= 96 && st() < num_items) {
    find(0);
    if (threadIdx.x % 32 == 0) load_tiles(0);
    __syncwarp();
    float2 row[2];
    fetch(0, row);
    finish(0, row);
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
  for (int n = st(), i = 0; n < num_items; n += kHeadGroups, i++) {
    const int tid = thread_index() % 128;
    const Stage& stage = s.stage[st()][i & 1];
    barrier_wait(&s.raw_full[st()], i & 1);
    if (stage.item.rest < kChunk) clear_tail(s.k[st()], s.q[st()], stage.item.rest, barrier());
    uint32_t aqk[16];
    float2 row[2];  // the last warp's, for the next item
    {
      float kk[32], qk[32];
      multiply_pairs<E>(s.k[st()], s.q[st()], kk, qk);
      if (params.has_norm)
        token_squares<E>(s.q[st()], tid / 32, Lane(tid), [&](int token, float x) {
          scores().q_scale[token] =
              token < stage.item.rest ? params.scale * rsqrtf(x + 1e-6f) : params.scale;
        });
      else if (tid < kChunk)
        put_token(scores(), stage.g_sum, tid, false, 0.f);
      if (tid == 64) tensor_store_wait_read();
      __syncwarp();
      wgmma_wait<0>();
      fence_operands(kk);
      fence_operands(qk);
      if (params.has_norm) put_tokens(scores(), stage, kk);
      named_sync(barrier(), 128);  // scales of all tokens; tiles and the packet before are read
      if (tid == 0 && n + kHeadGroups < num_items) load_tiles(i + 1);  // its warp has fewest pairs
      if (tid >= 96 && is_item(i + 1)) fetch(i + 1, row);
      __syncwarp();
      pair_scores<E>(scores(), stage, kk, qk, aqk);
    }
    named_sync(barrier(), 128);  // L complete
    if (tid < 64) {
      invert_half<false>(block_at(scores().l, 2 * (tid / 32), 2 * (tid / 32)), Lane(tid));
    } else if (tid < 96) {
      publish();
    } else {
      finish(i + 1, row);
      find(i + 2);
    }
    named_sync(barrier(), 128);  // both halves of the inverse
    write_solved<E>(scores(), barrier());
    write_packet<E>(scores(), stage, aqk, barrier());
    ready = stage.item.ready, step = stage.item.step;
    if (tid == 64) {
      const int over = step - params.ring_slots;
      if (over >= 0) {  // the packet's place has been read by its carrier
        wait_flag<false>(stage.item.consumed, over + 1);
        if (params.is_transfer) wait_flag<false>(stage.item.consumed + 32, over + 1);
      }
      bulk_store(stage.item.packet, &scores().packet, kRestBytes<GateKind::kHead>);
    }
    __syncwarp();
  }
  if (threadIdx.x % 128 >= 64) publish();
}

}  // namespace deltic::gpu::forward
