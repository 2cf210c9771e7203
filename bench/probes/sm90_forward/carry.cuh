// The state chain: a warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through the
// chunks of its CTA's positions. All products are (value x .) accumulators, so a token's factor is a
// column's. Packets arrive by bulk copy from the ring; with gates per head k and q come as they are.
#pragma once
#include "plan.cuh"
#include "ptx.cuh"
#include "smem.h"

namespace deltic::gpu {

// The second CTA of a transfer's carrier has M instead of values.
template <bool kTransfer>
__device__ inline bool is_identity() {
  return kTransfer && blockIdx.x % 2 == 1;
}
__device__ inline int num_positions(const Plan& plan, int carrier) {
  return max(0, min(plan.total - carrier * plan.steps, plan.steps));
}
template <Gate kGate, bool kTransfer>
__device__ inline void init_carry_barriers(CarrySmem<kGate>& s) {
  for (int i = 0; i < kKeyStages; i++)
    barrier_init(&s.keys_full[i], 1), barrier_init(&s.keys_empty[i], 8);
  for (int i = 0; i < s.kRestStages; i++)
    barrier_init(&s.rest_full[i], 1), barrier_init(&s.rest_empty[i], 8);
  for (int i = 0; i < kValueStages; i++)  // freed by a thread that saw o leave, or by warps
    barrier_init(&s.v_full[i], 1), barrier_init(&s.v_empty[i], kTransfer ? 8 : 2);
}

struct CarryMaps {
  const CUtensorMap *q, *k, *v;
};
// One thread: packets, keys and values of every position of carrier i.
template <Gate kGate, bool kTransfer>
__device__ inline void load_packets(CarrySmem<kGate>& s, const Params& params, const Plan& plan,
                                    CarryMaps maps, int carrier) {
  const int count = num_positions(plan, carrier);
  int token = 0, v_token = 0, head = 0, qk_head = 0, left = 0;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    if (left == 0) {  // the next job, or part of one
      const Place p = place_of(params, plan, carrier * plan.steps + n);
      token = v_token = __ldg(params.cu_seqlens + p.seq) + p.chunk * kChunk, head = p.head;
      qk_head = divide(head, divide(params.num_value_heads, params.num_heads));
      left = p.end - p.begin;
      if (is_identity<kTransfer>()) v_token = 1 << 30;  // outside: zeros arrive
    }
    const int ks = n % kKeyStages, rs = n % s.kRestStages, vs = n % kValueStages;
    const int slot = n & (params.ring_slots - 1);
    auto* packet = reinterpret_cast<const Packet<kGate>*>(params.ring) +
                   int64_t(carrier) * params.ring_slots + slot;
    auto load_keys = [&] {
      barrier_wait(&s.keys_empty[ks], (n / kKeyStages & 1) ^ 1);
      barrier_expect(&s.keys_full[ks], 2 * kTile);
      if constexpr (kGate == Gate::kChannel) {
        bulk_load(s.k[ks], packet->keys.k, kTile, &s.keys_full[ks]);
        bulk_load(s.q[ks], packet->keys.q, kTile, &s.keys_full[ks]);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          tensor_load<kEvictNormal>(s.k[ks] + h * kHalf, maps.k, 64 * h, qk_head, token,
                                    &s.keys_full[ks]);
          tensor_load<kEvictNormal>(s.q[ks] + h * kHalf, maps.q, 64 * h, qk_head, token,
                                    &s.keys_full[ks]);
        }
      }
    };
    if constexpr (kGate == Gate::kHead) load_keys();
    barrier_wait(&s.v_empty[vs], (n / kValueStages & 1) ^ 1);
    barrier_expect(&s.v_full[vs], kTile);
    tensor_load(s.v[vs][0], maps.v, 0, head, v_token, &s.v_full[vs]);
    tensor_load(s.v[vs][1], maps.v, 64, head, v_token, &s.v_full[vs]);
    if (n > 1) {  // all of the packet before the last is here: its place in the ring is free
      const int m = n - 2;
      barrier_wait(&s.rest_full[m % s.kRestStages], (m / s.kRestStages) & 1);
      if constexpr (kGate == Gate::kChannel)
        barrier_wait(&s.keys_full[m % kKeyStages], (m / kKeyStages) & 1);
      store_relaxed(consumed_flag(params, blockIdx.x), n - 1);
    }
    TRACE(2, n, 0);
    wait_flag<true>(ready_flag(params, carrier, slot), n + 1);
    TRACE(2, n, 1);
    fence_async_proxy_all();  // packets per channel are written by ordinary stores
    if constexpr (kGate == Gate::kChannel) load_keys();
    TRACE(2, n, 2);
    barrier_wait(&s.rest_empty[rs], (n / s.kRestStages & 1) ^ 1);
    TRACE(2, n, 3);
    barrier_expect(&s.rest_full[rs], kRestBytes<kGate>);
    bulk_load(&s.rest[rs], &packet->rest, kRestBytes<kGate>, &s.rest_full[rs]);
    token += kChunk, v_token += kChunk, left--;
  }
}

__device__ inline int carry_tid() { return thread_index(); }
__device__ inline void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (carry_tid() % 32 == 0) barrier_arrive(barrier);
}
// Lane's byte offset for ldmatrix / stmatrix of token groups 0, 1 in a 64 x 64 half tile of v or o.
__device__ inline uint32_t fragment_offset(int tid) {
  const int lane = tid % 32, token = (lane >> 4) * 8 + lane % 8;
  return swizzled(token, 2 * ((tid / 32) & 3) + ((lane >> 3) & 1));
}
// Factors of columns 16 i + 2 x, + 1, + 8, + 9 (factor_place).
__device__ inline float4 factors_at(const float* table, int i) {
  const int x = carry_tid() % 4;
  return *reinterpret_cast<const float4*>(table + 16 * x + ((4 * i) ^ (4 * (x / 2))));
}

// Rows past the sequence's end belong to someone else: replaced by zeros, not multiplied away.
template <Gate kGate>
__device__ inline void clear_tail(CarrySmem<kGate>& s, int n, int rest) {
  const int tid = carry_tid(), row = tid % 128 / 2;
  barrier_wait(&s.v_full[n % kValueStages], (n / kValueStages) & 1);
  if (row >= rest) {
    uint8_t* v = s.v[n % kValueStages][tid / 128] + row * 128;
    uint8_t* k = s.k[n % kKeyStages] + row * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 4 * (tid % 2) + i;
      reinterpret_cast<uint4*>(v)[at] = uint4{0, 0, 0, 0};
      if constexpr (kGate == Gate::kHead) {  // both warpgroups do, for their own products
        reinterpret_cast<uint4*>(k)[at] = uint4{0, 0, 0, 0};
        reinterpret_cast<uint4*>(k + kHalf)[at] = uint4{0, 0, 0, 0};
      }
    }
  }
  fence_async_proxy();
  named_sync(1 + tid / 128, 128);  // k and v of the warpgroup are clean
}

// o of chunk n, rounded, as the fragments that stmatrix takes.
template <Gate kGate>
__device__ inline void round_output(const CarrySmem<kGate>& s, int n, const float (&o)[32],
                                    uint32_t (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 f = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (kGate == Gate::kChannel) f = factors_at(s.rest[n % s.kRestStages].o_factor, i);
    r[4 * i] = pack_bf16(o[8 * i] * f.x, o[8 * i + 1] * f.y);
    r[4 * i + 1] = pack_bf16(o[8 * i + 2] * f.x, o[8 * i + 3] * f.y);
    r[4 * i + 2] = pack_bf16(o[8 * i + 4] * f.z, o[8 * i + 5] * f.w);
    r[4 * i + 3] = pack_bf16(o[8 * i + 6] * f.z, o[8 * i + 7] * f.w);
  }
}
// To the place of the chunk's values, and out. Frees the place of the chunk before.
template <Gate kGate>
__device__ inline void store_output(CarrySmem<kGate>& s, int n, int token, int rest, int head,
                                    const uint32_t (&r)[16], const Params& params,
                                    const CUtensorMap* map) {
  const int tid = carry_tid(), wg = tid / 128;
  uint8_t* const tile = s.v[n % kValueStages][wg];
  const uint32_t ob = smem_u32(tile) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++)
    stmatrix_x4_trans(ob + i * 2048, *reinterpret_cast<const uint32_t(*)[4]>(&r[4 * i]));
  fence_async_proxy();
  if (tid % 128 == 0) {
    tensor_store_wait_read();
    if (n > 0) barrier_arrive(&s.v_empty[(n - 1) % kValueStages]);
  }
  named_sync(1 + wg, 128);  // the tile is complete
  if (rest >= kChunk) {
    if (tid % 128 == 0) tensor_store(map, tile, 64 * wg, head, token);
  } else {
    const int row = tid % 128 / 2;
    if (row < rest) {
      auto* dst =
          params.o + (int64_t(token + row) * params.num_value_heads + head) * kWidth + 64 * wg;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk16 = 4 * (tid % 2) + i;
        reinterpret_cast<uint4*>(dst)[chunk16] =
            *reinterpret_cast<uint4*>(tile + swizzled(row, chunk16));
      }
    }
    named_sync(1 + wg, 128);  // the tile has been read
  }
}

// First element of the thread's rows in a V-first state; columns are channels 8 j + 2 x (+ 1).
__device__ inline int64_t state_offset() {
  const int tid = carry_tid();
  return int64_t(16 * (tid / 32) + tid % 32 / 4) * kWidth + 2 * (tid % 4);
}
__device__ inline void load_state(const float* from, float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float2 f = make_float2(0.f, 0.f);
    if (from)
      f = __ldcg(reinterpret_cast<const float2*>(from + state_offset() + (i & 1) * 8 * kWidth +
                                                 (i >> 1) * 8));
    S[2 * i] = f.x, S[2 * i + 1] = f.y;
  }
}
__device__ inline void identity_state(float (&S)[64]) {
  const int64_t at = state_offset();
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int e = int(at) + (i & 1) * 8 * kWidth + (i >> 1) * 8;
    S[2 * i] = e / kWidth == e % kWidth ? 1.f : 0.f;
    S[2 * i + 1] = e / kWidth == e % kWidth + 1 ? 1.f : 0.f;
  }
}
__device__ inline void store_state(float* to, const float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; i++)
    *reinterpret_cast<float2*>(to + state_offset() + (i & 1) * 8 * kWidth + (i >> 1) * 8) =
        make_float2(S[2 * i], S[2 * i + 1]);
}

// The part of a job that begins at position n: where it is, and its state.
template <bool kTransfer>
__device__ inline void begin_part(Part& part, const Params& params, const Plan& plan, int n,
                                  float (&S)[64]) {
  constexpr int group = kTransfer ? 2 : 1;
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  const int first = __ldg(params.cu_seqlens + p.seq);
  const int len = __ldg(params.cu_seqlens + p.seq + 1) - first;
  const int64_t job = int64_t(p.seq) * params.num_value_heads + p.head;
  named_sync(1 + carry_tid() / 128, 128);  // nobody reads the part before any more
  if (carry_tid() % 128 == 0) {
    if (p.begin > 0) wait_flag<true>(handoff_flag(params, blockIdx.x + group), 2);
    part = {first + (p.begin - n) * kChunk, len - (p.begin - n) * kChunk, p.head, n,
            n + p.end - p.begin};
  }
  named_sync(1 + carry_tid() / 128, 128);  // the part is known
  if (p.begin > 0) {                       // the state comes from the next carrier
    load_state(params.handoff + int64_t(blockIdx.x + group) * kWidth * kWidth, S);
  } else if (kTransfer) {
    if (is_identity<kTransfer>())
      identity_state(S);
    else
      load_state(nullptr, S);
  } else {
    load_state(params.state_in ? params.state_in + job * kWidth * kWidth : nullptr, S);
  }
}
// The part whose last position is n: its state to the carrier before, or out.
template <bool kTransfer>
__device__ inline void end_part(const Params& params, const Plan& plan, int n,
                                const float (&S)[64]) {
  constexpr int group = kTransfer ? 2 : 1;
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  const int64_t job = int64_t(p.seq) * params.num_value_heads + p.head;
  if (p.end < p.count) {
    store_state(params.handoff + int64_t(blockIdx.x) * kWidth * kWidth, S);
    __threadfence();
    named_sync(1 + carry_tid() / 128, 128);
    if (carry_tid() % 128 == 0) atomicAdd(handoff_flag(params, blockIdx.x), 1u);
  } else if (params.state_out) {
    const int64_t all = int64_t(params.num_seqs) * params.num_value_heads;
    store_state(
        params.state_out + (is_identity<kTransfer>() ? all + job : job) * kWidth * kWidth, S);
  }
}

// acc = what T is to be multiplied with, from k S in acc and v, as the operand of the next product.
template <Gate kGate>
__device__ inline void subtract_from_values(const float* factor, const uint32_t (&v)[16],
                                            const float (&acc)[32], uint32_t (&av)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 f = factors_at(factor, i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float fx = j < 2 ? f.x : f.z, fy = j < 2 ? f.y : f.w;
      const float lo = bf16_lo(v[4 * i + j]), hi = bf16_hi(v[4 * i + j]);
      const float x = acc[8 * i + 2 * j], y = acc[8 * i + 2 * j + 1];
      av[4 * i + j] = kGate == Gate::kChannel ? pack_bf16(fmaf(lo, fx, -x), fmaf(hi, fy, -y))
                                              : pack_bf16(fmaf(-x, fx, lo), fmaf(-y, fy, hi));
    }
  }
}
// The operand of the state's update: rows with decays to the end (per channel), or k as it is.
template <Gate kGate>
__device__ inline uint64_t update_keys(CarrySmem<kGate>& s, int ks, int rs) {
  const uint8_t* tile;
  if constexpr (kGate == Gate::kChannel)
    tile = s.rest[rs].kr;
  else
    tile = s.k[ks];
  return tile_desc(smem_u32(tile), kHalf, 1024);
}
template <Gate kGate>
__device__ inline void decay_state(const float* decay, float (&S)[64]) {
  if constexpr (kGate == Gate::kChannel) {
    const int x = carry_tid() % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 d = *reinterpret_cast<const float4*>(decay + 32 * x + ((4 * j) ^ (4 * x)));
      S[8 * j] *= d.x, S[8 * j + 1] *= d.y, S[8 * j + 2] *= d.x, S[8 * j + 3] *= d.y;
      S[8 * j + 4] *= d.z, S[8 * j + 5] *= d.w, S[8 * j + 6] *= d.z, S[8 * j + 7] *= d.w;
    }
  } else {
    const float d = *decay;
#pragma unroll
    for (int j = 0; j < 64; j++) S[j] *= d;
  }
}

// Gates per head: the two warpgroups take turns with the first half of a step (to the products with T and q): one
// has the tensor cores while the other converts. Named barriers 3 and 4: warpgroup 0, 1 is through.
__device__ inline void wait_turn(int n) {
  if (carry_tid() >= 128)
    named_sync(3, 256);
  else if (n > 0)
    named_sync(4, 256);
}
__device__ inline void pass_turn() { named_arrive(carry_tid() >= 128 ? 4 : 3, 256); }

// Two warpgroups: every position of the carrier. A step, and what runs beside the products:
//   k S           | o of the chunk before rounded; v to registers
//   T (v - k S)   | q S ; o of the chunk before out; S *= decay
//   S += k^T v_new| per head: q S times its factor
//   o = q S + Aqk v_new
template <Gate kGate, bool kTransfer>
__device__ inline void carry_state(CarrySmem<kGate>& s, const Params& params,
                                   const CUtensorMap* map_o) {
  constexpr bool kIsHead = kGate == Gate::kHead;
  constexpr int kRestStages = CarrySmem<kGate>::kRestStages;
  float S[64], acc[32], O[32] = {};
  uint32_t av[16];
  auto part = [&]() -> const Part& { return s.part[carry_tid() / 128]; };
  int n = 0;
#pragma unroll 1
  while (n < num_positions(*params.plan, blockIdx.x / (kTransfer ? 2 : 1))) {
    begin_part<kTransfer>(s.part[carry_tid() / 128], params, *params.plan, n, S);
#pragma unroll 1
    do {
      TRACE(threadIdx.x / 128, n, 0);
      const int ks = n % kKeyStages, rs = n % kRestStages, vs = n % kValueStages;
      barrier_wait(&s.keys_full[ks], (n / kKeyStages) & 1);
      if (reread(part().rest) - n * kChunk < kChunk)
        clear_tail(s, n, reread(part().rest) - n * kChunk);
      const uint64_t kd = tile_desc(smem_u32(s.k[ks]), 16, 1024);
      const uint64_t qd = tile_desc(smem_u32(s.q[ks]), 16, 1024);
      TRACE(threadIdx.x / 128, n, 1);
      uint32_t as[32];
#pragma unroll
      for (int i = 0; i < 32; i++) as[i] = pack_bf16(S[2 * i], S[2 * i + 1]);
      if constexpr (kIsHead) wait_turn(n);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 8; j++)  // k S
        wgmma<MmaN64>(acc, &as[4 * j], desc_at(kd, (j / 4) * kHalf + (j % 4) * 32), j > 0);
      cute::warpgroup_commit_batch();
      TRACE(threadIdx.x / 128, n, 2);
      barrier_wait(&s.v_full[vs], (n / kValueStages) & 1);
      uint32_t v[16], ob[16];
      {
        const uint32_t vb = smem_u32(s.v[vs][carry_tid() / 128]) + fragment_offset(carry_tid());
#pragma unroll
        for (int i = 0; i < 4; i++)
          ldmatrix_x4_trans(*reinterpret_cast<uint32_t(*)[4]>(&v[4 * i]), vb + i * 2048);
      }
      if constexpr (kTransfer)
        warp_arrive(&s.v_empty[vs]);
      else if (n > 0)
        round_output(s, n - 1, O, ob);  // not used if another job begins
      TRACE(threadIdx.x / 128, n, 3);
      barrier_wait(&s.rest_full[rs], (n / kRestStages) & 1);
      TRACE(threadIdx.x / 128, n, 4);
      auto& rest = s.rest[rs];
      const uint64_t td = tile_desc(smem_u32(rest.solved.t), 16, 1024);
      const uint64_t aq = tile_desc(smem_u32(rest.solved.aqk), 16, 1024);
      cute::warpgroup_wait<0>();
      TRACE(threadIdx.x / 128, n, 5);
      fence_operands(acc);
      if constexpr (kIsHead)
        subtract_from_values<kGate>(rest.ks_factor, v, acc, av);
      else
        subtract_from_values<kGate>(rest.v_factor, v, acc, av);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)  // v_new
        wgmma<MmaN64>(acc, &av[4 * j], desc_at(td, j * 32), j > 0);
      cute::warpgroup_commit_batch();
      if constexpr (!kTransfer) {
        fence_operands(O);
        cute::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < 8; j++)  // q S
          wgmma<MmaN64>(O, &as[4 * j], desc_at(qd, (j / 4) * kHalf + (j % 4) * 32), j > 0);
        cute::warpgroup_commit_batch();
      }
      if constexpr (kIsHead) pass_turn();
      if constexpr (!kTransfer) {
        if (n > 0) warp_arrive(&s.rest_empty[(n - 1) % kRestStages]);
        if (n > reread(part().first))
          store_output(s, n - 1, reread(part().token) + (n - 1) * kChunk, kChunk,
                       reread(part().head), ob, params, map_o);
      }
      TRACE(threadIdx.x / 128, n, 6);
      decay_state<kGate>(rest.decay, S);
      uint32_t h[8];
      if constexpr (kIsHead) {
        const uint4* t = reinterpret_cast<const uint4*>(rest.v_new_factor) + 2 * (carry_tid() % 4);
        const uint4 a = t[0], b = t[1];
        h[0] = a.x, h[1] = a.y, h[2] = a.z, h[3] = a.w;
        h[4] = b.x, h[5] = b.y, h[6] = b.z, h[7] = b.w;
      }
      cute::warpgroup_wait<kTransfer ? 0 : 1>();
      TRACE(threadIdx.x / 128, n, 7);
      fence_operands(acc);
      uint32_t ah[16];  // v_new with the decays to the chunk's end
#pragma unroll
      for (int i = 0; i < 16; i++) {
        av[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
        ah[i] = kIsHead ? mul_bf16x2(av[i], h[i / 2]) : av[i];
      }
      fence_operands(S);
      cute::warpgroup_arrive();
      const uint64_t kr = update_keys(s, ks, rs);
#pragma unroll
      for (int j = 0; j < 4; j++)  // S += (k with decays to the end)^T v_new
        wgmma<MmaN128>(S, &ah[4 * j], desc_at(kr, j * 2048));
      cute::warpgroup_commit_batch();
      TRACE(threadIdx.x / 128, n, 8);
      if constexpr (!kTransfer) {
        if constexpr (kIsHead) {
          cute::warpgroup_wait<1>();
          fence_operands(O);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float4 f = factors_at(rest.qs_factor, i);
            O[8 * i] *= f.x, O[8 * i + 1] *= f.y, O[8 * i + 2] *= f.x, O[8 * i + 3] *= f.y;
            O[8 * i + 4] *= f.z, O[8 * i + 5] *= f.w, O[8 * i + 6] *= f.z, O[8 * i + 7] *= f.w;
          }
        }
        fence_operands(O);
        cute::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < 4; j++)  // o
          wgmma<MmaN64>(O, &av[4 * j], desc_at(aq, j * 32));
        cute::warpgroup_commit_batch();
      }
      TRACE(threadIdx.x / 128, n, 9);
      cute::warpgroup_wait<0>();
      fence_operands(S);
      fence_operands(O);
      warp_arrive(&s.keys_empty[n % kKeyStages]);
      if constexpr (kTransfer) warp_arrive(&s.rest_empty[n % kRestStages]);
      n++;
    } while (n < reread(part().end));
    if constexpr (!kTransfer) {
      uint32_t ob[16];
      round_output(s, n - 1, O, ob);
      store_output(s, n - 1, part().token + (n - 1) * kChunk, part().rest - (n - 1) * kChunk,
                   part().head, ob, params, map_o);
    }
    end_part<kTransfer>(params, *params.plan, n - 1, S);
  }
  if (kIsHead && n > 0 && carry_tid() < 128) named_sync(4, 256);  // what the other warpgroup passed last
  if (carry_tid() % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace deltic::gpu
