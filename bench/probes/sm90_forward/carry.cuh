// The state chain: a warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through the
// chunks of its CTA's positions. Packets arrive by bulk copy from the ring.
//
// The chain's first product accumulates on -v |k| (the scale of v comes negated), and T comes
// negated: no instruction is spent on signs.
#pragma once
#include "plan.cuh"
#include "ptx.cuh"
#include "smem.h"

namespace deltic::gpu {

// The second CTA of a transfer's carrier has M instead of values.
__device__ inline bool is_identity(const Params& params) {
  return params.is_transfer && blockIdx.x % 2 == 1;
}
__device__ inline int num_positions(const Plan& plan, int carrier) {
  return max(0, min(plan.total - carrier * plan.steps, plan.steps));
}
// One thread: packets and values of every position of carrier i.
__device__ inline void load_packets(CarrySmem& s, const Params& params, const Plan& plan,
                                    const CUtensorMap* map_v, int carrier) {
  const int count = num_positions(plan, carrier);
  int token = 0, head = 0, left = 0;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    if (left == 0) {  // the next job, or part of one
      const Place p = place_of(params, plan, carrier * plan.steps + n);
      token = __ldg(params.cu_seqlens + p.seq) + p.chunk * kChunk, head = p.head;
      left = p.end - p.begin;
      if (is_identity(params)) token = 1 << 30;  // outside: zeros arrive
    }
    const int ks = n % kKeyStages, rs = n % kRestStages, slot = n & (params.ring_slots - 1);
    const Packet* packet = params.ring + int64_t(carrier) * params.ring_slots + slot;
    if (n > 0) {  // all of the packet before is here: its place in the ring is free
      const int m = n - 1;
      barrier_wait(&s.keys_full[m % kKeyStages], (m / kKeyStages) & 1);
      barrier_wait(&s.rest_full[m % kRestStages], (m / kRestStages) & 1);
      store_relaxed(consumed_flag(params, blockIdx.x), n);
    }
    TRACE(2, n, 0);
    wait_flag<true>(ready_flag(params, carrier, slot), n + 1);
    TRACE(2, n, 1);
    fence_async_proxy_all();  // written by ordinary stores, read by bulk copies
    barrier_wait(&s.keys_empty[ks], (n / kKeyStages & 1) ^ 1);
    barrier_expect(&s.keys_full[ks], sizeof(PacketKeys) + sizeof(packet->scales) + kTile);
    bulk_load(&s.keys[ks], &packet->keys, sizeof(PacketKeys), &s.keys_full[ks]);
    bulk_load(s.scales[ks], packet->scales, sizeof(packet->scales), &s.keys_full[ks]);
    tensor_load(s.v[ks][0], map_v, 0, head, token, &s.keys_full[ks]);
    tensor_load(s.v[ks][1], map_v, 64, head, token, &s.keys_full[ks]);
    TRACE(2, n, 2);
    barrier_wait(&s.rest_empty[rs], (n / kRestStages & 1) ^ 1);
    TRACE(2, n, 3);
    barrier_expect(&s.rest_full[rs], sizeof(PacketRest));
    bulk_load(s.kr[rs], packet->rest.kr, kTile, &s.rest_full[rs]);
    bulk_load(s.t[rs], packet->rest.t, kHalf, &s.rest_full[rs]);
    bulk_load(s.aqk[rs], packet->rest.aqk, kHalf, &s.rest_full[rs]);
    bulk_load(s.decay[rs], packet->rest.decay, sizeof(s.decay[0]), &s.rest_full[rs]);
    token += kChunk, left--;
  }
}

__device__ inline int carry_tid() { return thread_index(); }
// Lane's byte offset for ldmatrix / stmatrix of token groups 0, 1 in a 64 x 64 half tile of v or o.
__device__ inline uint32_t fragment_offset(int tid) {
  const int lane = tid % 32, token = (lane >> 4) * 8 + lane % 8;
  return swizzled(token, 2 * ((tid / 32) & 3) + ((lane >> 3) & 1));
}

// Waits for v. Rows past the sequence's end are replaced, not multiplied away.
__device__ inline void wait_values(CarrySmem& s, int n, int rest) {
  barrier_wait(&s.keys_full[n % kKeyStages], (n / kKeyStages) & 1);
  if (rest < kChunk) {
    const int tid = carry_tid(), row = tid % 128 / 2;
    uint8_t* tile = s.v[n % kKeyStages][tid / 128];
    if (row >= rest)
#pragma unroll
      for (int i = 0; i < 4; i++)
        reinterpret_cast<uint4*>(tile + row * 128)[4 * (tid % 2) + i] = uint4{0, 0, 0, 0};
    named_sync(1 + tid / 128, 128);
  }
}
// acc = -v |k| as V x token accumulators: the inverse carries the matching 1/|k|. No branch: runs
// while products are under way.
__device__ inline void load_values(CarrySmem& s, int st, float (&acc)[32]) {
  const int tid = carry_tid(), x = tid % 4;
  uint8_t* tile = s.v[st][tid / 128];
  const uint32_t vb = smem_u32(tile) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, vb + i * 2048);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 f =
          *reinterpret_cast<const float2*>(&s.scales[st][16 * i + 8 * (j >> 1) + 2 * x]);
      acc[8 * i + 2 * j] = bf16_lo(r[j]) * f.x;
      acc[8 * i + 2 * j + 1] = bf16_hi(r[j]) * f.y;
    }
  }
}
// o of one chunk: scaled, through shared memory, out. Frees the packet's first part.
__device__ inline void store_output(CarrySmem& s, int st, int token, int rest, int head,
                                    const float (&o)[32], const Params& params,
                                    const CUtensorMap* map) {
  const int tid = carry_tid(), x = tid % 4, wg = tid / 128;
  if (params.is_transfer) {
    barrier_arrive(&s.keys_empty[st]);
    return;
  }
  if (tid % 128 == 0) tensor_store_wait_read();
  named_sync(1 + wg, 128);  // the copy of the chunk before has left the tile
  const uint32_t ob = smem_u32(s.o[wg]) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t r[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 f =
          *reinterpret_cast<const float2*>(&s.scales[st][kChunk + 16 * i + 8 * (j >> 1) + 2 * x]);
      r[j] = pack_bf16(o[8 * i + 2 * j] * f.x, o[8 * i + 2 * j + 1] * f.y);
    }
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(ob + i * 2048),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  }
  barrier_arrive(&s.keys_empty[st]);
  fence_async_proxy();
  named_sync(1 + wg, 128);  // the tile is complete
  if (rest >= kChunk) {
    if (tid % 128 == 0) tensor_store(map, s.o[wg], 64 * wg, head, token);
  } else {
    const int row = tid % 128 / 2;
    if (row < rest) {
      auto* dst =
          params.o + (int64_t(token + row) * params.num_value_heads + head) * kWidth + 64 * wg;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk16 = 4 * (tid % 2) + i;
        reinterpret_cast<uint4*>(dst)[chunk16] =
            *reinterpret_cast<uint4*>(s.o[wg] + swizzled(row, chunk16));
      }
    }
    named_sync(1 + wg, 128);  // read before the next job writes the tile
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
__device__ inline void begin_part(CarrySmem& s, const Params& params, const Plan& plan, int n,
                                  float (&S)[64]) {
  const int group = group_of(params);
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  const int first = __ldg(params.cu_seqlens + p.seq);
  const int len = __ldg(params.cu_seqlens + p.seq + 1) - first;
  const int64_t job = int64_t(p.seq) * params.num_value_heads + p.head;
  named_sync(1 + carry_tid() / 128, 128);  // nobody reads the part before any more
  if (carry_tid() % 128 == 0) {
    if (p.begin > 0) wait_flag<true>(handoff_flag(params, blockIdx.x + group), 2);
    s.part[carry_tid() / 128] = {first + (p.begin - n) * kChunk, len - (p.begin - n) * kChunk,
                                 p.head, n, n + p.end - p.begin};
  }
  named_sync(1 + carry_tid() / 128, 128);
  if (p.begin > 0) {  // the state comes from the next carrier
    load_state(params.handoff + int64_t(blockIdx.x + group) * kWidth * kWidth, S);
  } else if (params.is_transfer) {
    if (is_identity(params))
      identity_state(S);
    else
      load_state(nullptr, S);
  } else {
    load_state(params.state_in ? params.state_in + job * kWidth * kWidth : nullptr, S);
  }
}
// The part whose last position is n: its state to the carrier before, or out.
__device__ inline void end_part(const Params& params, const Plan& plan, int n,
                                const float (&S)[64]) {
  const int group = group_of(params);
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  const int64_t job = int64_t(p.seq) * params.num_value_heads + p.head;
  if (p.end < p.count) {
    store_state(params.handoff + int64_t(blockIdx.x) * kWidth * kWidth, S);
    __threadfence();
    named_sync(1 + carry_tid() / 128, 128);
    if (carry_tid() % 128 == 0) atomicAdd(handoff_flag(params, blockIdx.x), 1u);
  } else if (params.state_out) {
    const int64_t all = int64_t(params.num_seqs) * params.num_value_heads;
    store_state(params.state_out + (is_identity(params) ? all + job : job) * kWidth * kWidth, S);
  }
}

// Two warpgroups: every position of the carrier. S takes 64 registers, its operand 32, two
// accumulators 64, the operand made of one 16, and the compiler keeps 24 below the accumulators:
// what else is needed in the loop is read again from shared memory.
__device__ inline void carry_state(CarrySmem& s, const Params& params, const CUtensorMap* map_o) {
  float S[64], acc[32], O[32] = {};
  uint32_t av[16];
  auto pack_acc = [&] {
#pragma unroll
    for (int i = 0; i < 16; i++) av[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  };
  auto part = [&]() -> const Part& { return s.part[carry_tid() / 128]; };
  int n = 0;
#pragma unroll 1
  while (n < num_positions(*params.plan, blockIdx.x / group_of(params))) {
    begin_part(s, params, *params.plan, n, S);
    wait_values(s, n, part().rest - n * kChunk);
    load_values(s, n % kKeyStages, acc);
#pragma unroll 1
    do {
      TRACE(0, n, 0);
      const int ks = n % kKeyStages, rs = n % kRestStages;
      const uint32_t ka = smem_u32(s.keys[ks].kd), qa = smem_u32(s.keys[ks].qd);
      uint32_t as[32];
#pragma unroll
      for (int i = 0; i < 32; i++) as[i] = pack_bf16(S[2 * i], S[2 * i + 1]);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 8; j++)  // (k exp(G)) S - v
        wgmma<MmaN64>(acc, &as[4 * j], tile_desc(ka + (j / 4) * kHalf + (j % 4) * 32, 16, 1024));
      cute::warpgroup_commit_batch();
      TRACE(0, n, 1);
      barrier_wait(&s.rest_full[rs], (n / kRestStages) & 1);
      TRACE(0, n, 2);
      cute::warpgroup_wait<0>();
      TRACE(0, n, 3);
      fence_operands(acc);
      pack_acc();
      const uint32_t ta = smem_u32(s.t[rs]), aa = smem_u32(s.aqk[rs]), ra = smem_u32(s.kr[rs]);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)  // v_new = -T (k S - v)
        wgmma<MmaN64>(acc, &av[4 * j], tile_desc(ta + j * 32, 16, 1024), j > 0);
      cute::warpgroup_commit_batch();
      if (n > reread(part().first))  // beside T: o of the chunk before
        store_output(s, (n - 1) % kKeyStages, reread(part().token) + (n - 1) * kChunk, kChunk,
                     reread(part().head), O, params, map_o);
      TRACE(0, n, 4);
      fence_operands(O);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 8; j++)  // (q exp(G)) S
        wgmma<MmaN64>(O, &as[4 * j], tile_desc(qa + (j / 4) * kHalf + (j % 4) * 32, 16, 1024),
                      j > 0);
      cute::warpgroup_commit_batch();
      {
        const float* decay = &s.decay[rs][2 * (carry_tid() % 4)];
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const float2 d = *reinterpret_cast<const float2*>(decay + 8 * j);
          S[4 * j] *= d.x, S[4 * j + 1] *= d.y, S[4 * j + 2] *= d.x, S[4 * j + 3] *= d.y;
        }
      }
      TRACE(0, n, 5);
      // The next chunk's values, long there; after the last chunk this one's again, not used.
      const int next = n + 1 < reread(part().end) ? n + 1 : n;
      wait_values(s, next, next > n ? reread(part().rest) - next * kChunk : kChunk);
      TRACE(0, n, 6);
      cute::warpgroup_wait<1>();
      TRACE(0, n, 7);
      fence_operands(acc);
      pack_acc();
      fence_operands(S);
      fence_operands(O);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)  // S += (k exp(G_last - G))^T v_new
        wgmma<MmaN128>(S, &av[4 * j], tile_desc(ra + j * 2048, kHalf, 1024));
      cute::warpgroup_commit_batch();
#pragma unroll
      for (int j = 0; j < 4; j++)  // o
        wgmma<MmaN64>(O, &av[4 * j], tile_desc(aa + j * 32, 16, 1024));
      cute::warpgroup_commit_batch();
      TRACE(0, n, 8);
      load_values(s, next % kKeyStages, acc);
      TRACE(0, n, 9);
      cute::warpgroup_wait<0>();
      fence_operands(S);
      fence_operands(O);
      barrier_arrive(&s.rest_empty[n % kRestStages]);
      n++;
    } while (n < reread(part().end));
    store_output(s, (n - 1) % kKeyStages, part().token + (n - 1) * kChunk,
                 part().rest - (n - 1) * kChunk, part().head, O, params, map_o);
    end_part(params, *params.plan, n - 1, S);
  }
  if (carry_tid() % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace deltic::gpu
