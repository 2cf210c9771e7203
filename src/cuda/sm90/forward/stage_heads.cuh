// Packets for gates per head, or none, made by the carrying CTA itself while it carries the chunk
// before: warpgroup 2 loads, k k^T, inverse; warpgroup 3 q k^T and the factors. Both products come
// straight from the raw tiles, decays by pairs.
#pragma once
#include "cuda/sm90/forward/stage_carry.cuh"
#include "cuda/sm90/forward/stage_scores.cuh"

namespace deltic::gpu::forward {

// Named barriers (carry_state has 1 to 4).
constexpr int kSolveBarrier = 5, kInvertBarrier = 6, kPairBarrier = 7;

// rows k^T, under way on return.
template <class E>
__device__ inline void multiply_pairs(const uint8_t* rows, const uint8_t* k, float (&acc)[32]) {
  const uint64_t a = tile_desc(smem_u32(rows), 16, 1024), b = tile_desc(smem_u32(k), 16, 1024);
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int at = (j / 4) * kHalf + (j % 4) * 32;
    wgmma<E, Major::k, Major::k>(acc, desc_at(a, at), desc_at(b, at), j > 0);
  }
  wgmma_commit();
}

// Rows past the sequence's end belong to someone else: zeros instead. All threads.
__device__ inline void clear_keys(uint8_t* tile, int rest) {
  const int tid = thread_index() % 128, row = tid / 2;
  if (row >= rest)
#pragma unroll
    for (int i = 0; i < 8; i++)
      *reinterpret_cast<uint4*>(tile + (i / 4) * kHalf + row * 128 + 64 * (tid % 2) +
                                16 * (i % 4)) = uint4{0, 0, 0, 0};
  fence_async_proxy();
  named_sync(kSolveBarrier, 128);  // the tile is clean
}

// use(i, j, x, y): decays from columns 8 j + 2 x, + 1 to row 8 i + g of the warp's 16, and whether
// each lies below (x, y) the diagonal by how many rows. Of 16 x 16 blocks only those on the
// diagonal have an upper part, and what lies above is not looked at.
template <class Use>
__device__ inline void each_pair(const float* g_sum, const float* column, Use use) {
  const int tid = thread_index() % 128, warp = tid / 32;
  const Lane ln(tid);
  const float g[2] = {g_sum[16 * warp + ln.g], g_sum[16 * warp + 8 + ln.g]};
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j < 2 * warp + 2) {
      const float2 c = *reinterpret_cast<const float2*>(&column[8 * j + 2 * ln.x]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int below =  // rows below the first column
            j >= 2 * warp ? 8 * i + ln.g - (8 * (j & 1) + 2 * ln.x) : 64;
        use(i, j, exp2_approx(g[i] - c.x), exp2_approx(g[i] - c.y), below);
      }
    }
}

// L to shared memory.
__device__ inline void key_scores(CarrySmem<GateKind::kHead>& s, const Stage& stage, int at,
                                  const float (&kk)[32]) {
  const int tid = thread_index() % 128, row = tid / 32 * 16 + tid % 32 / 4;
  const float bk[2] = {stage.beta[row] * s.k_scale[at][row],
                       stage.beta[row + 8] * s.k_scale[at][row + 8]};
  float* const l = &s.l[row * kPitch + 2 * (tid % 4)];
  each_pair(stage.g_sum, s.column[at], [&](int i, int j, float px, float py, int below) {
    const float x = kk[4 * j + 2 * i] * px * bk[i], y = kk[4 * j + 2 * i + 1] * py * bk[i];
    *reinterpret_cast<float2*>(l + 8 * i * kPitch + 8 * j) =
        make_float2(below > 0 ? x : 0.f, below > 1 ? y : 0.f);
  });
}
// Aqk to the packet.
template <class E>
__device__ inline void query_scores(CarrySmem<GateKind::kHead>& s, const Stage& stage, int at,
                                    const float (&qk)[32], uint8_t* out) {
  const int tid = thread_index() % 128, lane = tid % 32, row = tid / 32 * 16 + lane / 4;
  const float sq[2] = {s.q_scale[at][row], s.q_scale[at][row + 8]};
  uint32_t aqk[16] = {};
  each_pair(stage.g_sum, s.column[at], [&](int i, int j, float px, float py, int below) {
    const float x = qk[4 * j + 2 * i] * px * sq[i], y = qk[4 * j + 2 * i + 1] * py * sq[i];
    aqk[2 * j + i] = pack<E>(below >= 0 ? x : 0.f, below > 0 ? y : 0.f);
  });
  const int to = tid / 32 * 16 + (lane & 8) + lane % 8;
#pragma unroll
  for (int j = 0; j < 4; j++)
    stmatrix_x4(smem_u32(out) + swizzled(to, 2 * j + lane / 16),
                *reinterpret_cast<const uint32_t(*)[4]>(&aqk[4 * j]));
}
// T, with beta, from the inverse to the packet.
template <class E>
__device__ inline void write_solved(const float* inverse, const Stage& stage, uint8_t* out) {
  const int tid = thread_index() % 128, col = 4 * (tid % 16);
  const float4 b = *reinterpret_cast<const float4*>(&stage.beta[col]);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = tid / 16 + 8 * i;
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f);  // blocks above the diagonal are not there
    if (col / 16 <= row / 16) a = *reinterpret_cast<const float4*>(&inverse[row * kPitch + col]);
    *reinterpret_cast<uint2*>(out + swizzled(row, col / 8) + 2 * (col % 8)) =
        make_uint2(pack<E>(a.x * b.x, a.y * b.y), pack<E>(a.z * b.z, a.w * b.w));
  }
}
template <class E>
__device__ inline void write_factors(const CarrySmem<GateKind::kHead>& s, const Stage& stage,
                                     int at, Packet<GateKind::kHead>::Rest& out) {
  const int tid = thread_index() % 128, t = tid % kChunk;
  const float sum = stage.g_sum[t], last = stage.g_sum[kChunk - 1];
  if (tid < kChunk) {
    const float to = exp2_approx(sum);
    out.ks_factor[factor_place(t)] = to * s.k_scale[at][t];
    out.qs_factor[factor_place(t)] = to * s.q_scale[at][t];
  } else if (t < kChunk / 2) {
    const int c = 2 * t;
    const float x = exp2_approx(last - stage.g_sum[c]) * s.k_scale[at][c];
    const float y = exp2_approx(last - stage.g_sum[c + 1]) * s.k_scale[at][c + 1];
    if constexpr (kIsHalf<E>) {
      *reinterpret_cast<float2*>(&out.v_new_factor[0][0] + factor_place(c)) = make_float2(x, y);
    } else {
      const uint32_t high = pack_bf16(x, y);
      out.v_new_factor[0][pair_place(c)] = high;
      out.v_new_factor[1][pair_place(c)] = pack_bf16(x - bf16_lo(high), y - bf16_hi(high));
    }
    if (t == 0) out.decay = exp2_approx(last);
  }
}

struct CarryMaps {
  const CUtensorMap *q, *k, *v;
};
// What is loaded next; the same in all lanes of the loading warp.
struct Next {
  Where where;
  int left;  // chunks of the part from here on
};
// One warp: keys, queries, values of position n, its gates and beta.
template <bool kTransfer>
__device__ inline void load_position(CarrySmem<GateKind::kHead>& s, const Params& params,
                                     const CarryMaps& maps, int n, Next& next) {
  Where& w = next.where;
  if (next.left == 0) {
    const bool has_tables = s.plan.num_pieces <= kTablePieces;
    const int hv = opaque(params.num_value_heads);
    const Place p = locate(s.plan, has_tables ? s.prefix : params.chunk_prefix, hv,
                           int(blockIdx.x) / (kTransfer ? 2 : 1) * s.plan.steps + n);
    const Span span = has_tables ? s.spans[p.piece] : span_in_memory(params, p.piece);
    w.token = span.token + p.chunk * kChunk, w.rest = span.length - p.chunk * kChunk;
    w.batch = span.batch, w.head = p.head;
    w.qk_head = divide(p.head, divide(hv, params.num_heads));
    next.left = p.end - p.begin;
  }
  Fetched fetched;
  begin_item<GateKind::kHead>(s.stage[n & 1], params, w, fetched);
  if (thread_index() % 32 == 0) {
    const int ks = n % kKeyStages;
    barrier_wait(&s.keys_empty[ks], (n / kKeyStages & 1) ^ 1);
    barrier_expect(&s.keys_full[ks], 2 * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {  // the group's other heads read them too
      tensor_load<kEvictNormal>(s.k[ks] + h * kHalf, maps.k, 64 * h, w.qk_head, w.token, w.batch,
                                &s.keys_full[ks]);
      tensor_load<kEvictNormal>(s.q[ks] + h * kHalf, maps.q, 64 * h, w.qk_head, w.token, w.batch,
                                &s.keys_full[ks]);
    }
    load_values(s, maps.v, n, w.head, is_identity<kTransfer>() ? kOutside : w.token, w.batch);
  }
  __syncwarp();
  finish_head_item(s.stage[n & 1], params, fetched);
  arrive_item(&s.stage_full[n & 1]);
  w.token += kChunk, w.rest -= kChunk, next.left--;
}

// Warpgroup 2.
template <class E, bool kTransfer>
__device__ inline void solve_chunks(CarrySmem<GateKind::kHead>& s, const Params& params,
                                    CarryMaps maps) {
  const int count = num_positions(s.plan, blockIdx.x / (kTransfer ? 2 : 1));
  Next next{};
  if (threadIdx.x % 128 >= 96 && count > 0) load_position<kTransfer>(s, params, maps, 0, next);
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const int tid = thread_index() % 128, ks = n % kKeyStages, rs = n % kRestStages, at = n & 1;
    const Stage& stage = s.stage[at];
    barrier_wait(&s.stage_full[at], (n / 2) & 1);
    barrier_wait(&s.keys_full[ks], (n / kKeyStages) & 1);
    if (stage.item.rest < kChunk) clear_keys(s.k[ks], stage.item.rest);
    float kk[32];
    multiply_pairs<E>(s.k[ks], s.k[ks], kk);
    if (params.has_norm)
      token_squares<E>(s.k[ks], tid / 32, Lane(tid), [&](int token, float x) {
        const bool is_in = token < stage.item.rest;
        s.k_scale[at][token] = is_in ? rsqrtf(x + 1e-6f) : 1.f;
        s.column[at][token] = stage.g_sum[token] + (is_in ? .5f * log2_approx(x + 1e-6f) : 0.f);
      });
    else if (tid < kChunk)
      s.k_scale[at][tid] = 1.f, s.column[at][tid] = stage.g_sum[tid];
    named_sync(kPairBarrier, 256);  // scales of all tokens
    wgmma_wait<0>();
    fence_operands(kk);
    warp_arrive(&s.keys_empty[ks]);
    key_scores(s, stage, at, kk);
    named_sync(kSolveBarrier, 128);  // L complete
    if (tid < 96)
      invert(s.l, kInvertBarrier);
    else if (n + 1 < count)
      load_position<kTransfer>(s, params, maps, n + 1, next);
    named_sync(kSolveBarrier, 128);  // the inverse is complete
    barrier_wait(&s.rest_empty[rs], (n / kRestStages & 1) ^ 1);
    write_solved<E>(s.l, stage, s.rest[rs].solved.t);
    fence_async_proxy();
    warp_arrive(&s.rest_full[rs]);
  }
}
// Warpgroup 3. What a transfer does not need of the packet, q's part, is left out.
template <class E, bool kTransfer>
__device__ inline void score_chunks(CarrySmem<GateKind::kHead>& s, const Params& params) {
  const int count = num_positions(s.plan, blockIdx.x / (kTransfer ? 2 : 1));
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const int tid = thread_index() % 128, ks = n % kKeyStages, rs = n % kRestStages, at = n & 1;
    const Stage& stage = s.stage[at];
    barrier_wait(&s.stage_full[at], (n / 2) & 1);
    barrier_wait(&s.keys_full[ks], (n / kKeyStages) & 1);
    float qk[32];
    if constexpr (!kTransfer) multiply_pairs<E>(s.q[ks], s.k[ks], qk);
    if (params.has_norm)
      token_squares<E>(s.q[ks], tid / 32, Lane(tid), [&](int token, float x) {
        s.q_scale[at][token] =
            token < stage.item.rest ? params.scale * rsqrtf(x + 1e-6f) : params.scale;
      });
    else if (tid < kChunk)
      s.q_scale[at][tid] = params.scale;
    named_sync(kPairBarrier, 256);  // scales of all tokens
    if constexpr (!kTransfer) {
      wgmma_wait<0>();
      fence_operands(qk);
    }
    warp_arrive(&s.keys_empty[ks]);
    barrier_wait(&s.rest_empty[rs], (n / kRestStages & 1) ^ 1);
    if constexpr (!kTransfer) query_scores<E>(s, stage, at, qk, s.rest[rs].solved.aqk);
    write_factors<E>(s, stage, at, s.rest[rs]);
    fence_async_proxy();
    warp_arrive(&s.rest_full[rs]);
  }
}

}  // namespace deltic::gpu::forward
