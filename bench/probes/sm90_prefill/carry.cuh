// The state chain: one warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through
// the chunks.
//
// S takes 64 registers per thread, its bf16 operand 32 (k S) or 16 at a time (q S), one accumulator
// (v - k S, then v_new, then o) 32, the operand made of it 16, and the compiler keeps 24 below the
// accumulators: 152 of 160. So everything else is read again where it is needed: thread coordinates
// from the special register, places from shared memory.
#pragma once
#include "merge.cuh"

namespace deltic::gpu {

__device__ inline int carry_tid() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t - kSlabThreads;
}
// Lane's byte offset for ldmatrix / stmatrix of token groups 0, 1 in the warpgroup's v / o half
// tile.
__device__ inline uint32_t fragment_offset(int tid) {
  int lane = tid % 32, token = (lane >> 4) * 8 + lane % 8;
  int chunk16 = 2 * ((tid / 32) & 3) + ((lane >> 3) & 1);
  return token * 128 + ((chunk16 ^ (token & 7)) << 4);
}

// acc = v |k| as V x token accumulators: the inverse carries the matching 1/|k|.
__device__ inline void load_values(Smem& s, int par, int rest, float (&acc)[32]) {
  const int tid = carry_tid(), x = tid % 4;
  uint8_t* tile = s.v[tid / 128][par];
  if (rest < kChunk) {  // rows past the sequence's end are replaced, not multiplied away
    const int row = tid % 128 / 2;
    if (row >= rest)
#pragma unroll
      for (int i = 0; i < 4; i++)
        reinterpret_cast<uint4*>(tile + row * 128)[4 * (tid % 2) + i] = uint4{0, 0, 0, 0};
    named_sync(1 + tid / 128, 128);
  }
  const uint32_t vb = smem_u32(tile) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(vb + i * 2048)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 f = *reinterpret_cast<const float2*>(&s.v_scale[par][16 * i + 8 * (j >> 1) + 2 * x]);
      acc[8 * i + 2 * j] = bf16_lo(r[j]) * f.x;
      acc[8 * i + 2 * j + 1] = bf16_hi(r[j]) * f.y;
    }
  }
}

// o of chunk c into the place of its v. The copy out waits for the next barrier of all carrying
// warps; the last chunk's has one of its own.
__device__ inline void store_output(Smem& s, int c, bool last, const float (&o)[32],
                                    const Params& params, const CUtensorMap* map) {
  const int tid = carry_tid(), x = tid % 4, wg = tid / 128, par = c & 1;
  const uint32_t ob = smem_u32(s.v[wg][par]) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t r[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 f = *reinterpret_cast<const float2*>(&s.o_scale[par][16 * i + 8 * (j >> 1) + 2 * x]);
      r[j] = pack_bf16(o[8 * i + 2 * j] * f.x, o[8 * i + 2 * j + 1] * f.y);
    }
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(ob + i * 2048),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  }
  fence_async_proxy();
  if (!last) return;
  named_sync(1 + wg, 128);
  const int rest = reread(s.len) - c * kChunk, token0 = reread(s.begin) + c * kChunk,
            head = reread(s.head);
  if (rest >= kChunk) {
    if (tid % 128 == 0) tensor_store(map, s.v[wg][par], 64 * wg, head, token0);
  } else {
    const int row = tid % 128 / 2;
    if (row < rest) {
      auto* dst = params.o + (int64_t(token0 + row) * params.num_heads + head) * kWidth + 64 * wg;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int chunk16 = 4 * (tid % 2) + i;
        reinterpret_cast<uint4*>(dst)[chunk16] =
            *reinterpret_cast<uint4*>(s.v[wg][par] + row * 128 + ((chunk16 ^ (row & 7)) << 4));
      }
    }
  }
}

// First element of the thread's two rows of a V-first state; columns are key channels 8 j + 2 x
// (+1).
__device__ inline int64_t state_offset(const Params& params) {
  const int tid = carry_tid();
  return (int64_t(blockIdx.x) * kWidth + 16 * (tid / 32) + tid % 32 / 4) * kWidth + 2 * (tid % 4);
}

// k S takes -S, q S packs +S again: the sign keeps the compiler from holding on to the first
// operand.
__device__ inline void pack_state_again(const float* S, uint32_t (&as)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i++) as[i] = pack_bf16(S[2 * i], S[2 * i + 1]);
}

__device__ inline void carry_state(Smem& s, const Params& params, const CUtensorMap* map_v,
                                   const CUtensorMap* map_o) {
  auto load_v = [&](int c) {  // one thread of the warpgroup
    const int wg = carry_tid() / 128;
    uint64_t* bar = &s.v_full[wg][c & 1];
    barrier_expect(bar, kHalf);
    tensor_load(s.v[wg][c & 1], map_v, 64 * wg, reread(s.head), reread(s.begin) + c * kChunk, bar);
  };
  const int num_chunks = (s.len + kChunk - 1) / kChunk;
  if (carry_tid() % 128 == 0) {
    if (num_chunks > 0) load_v(0);
    if (num_chunks > 1) load_v(1);
  }
  float S[64], acc[32];
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float2 f = make_float2(0.f, 0.f);
    if (params.state_in)
      f = *reinterpret_cast<const float2*>(params.state_in + state_offset(params) +
                                           (i & 1) * 8 * kWidth + (i >> 1) * 8);
    S[2 * i] = f.x, S[2 * i + 1] = f.y;
  }
  uint32_t av[16];
  auto pack_acc = [&] {
#pragma unroll
    for (int i = 0; i < 16; i++) av[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  };
#pragma unroll 1
  for (int c = 0; c < num_chunks; c++) {
    const int stage = c % kStages;
    TRACE(c, 0);
    barrier_wait(&s.slabs_full[c & 1], (c >> 1) & 1);
    TRACE(c, 9);
    merge_chunk(s, c, [&] {
      const int wg = carry_tid() / 128;
      if (c > 0 && carry_tid() % 128 == 0)
        tensor_store(map_o, s.v[wg][(c - 1) & 1], 64 * wg, reread(s.head),
                     reread(s.begin) + (c - 1) * kChunk);
    });
    TRACE(c, 10);
    barrier_wait(&s.v_full[carry_tid() / 128][c & 1], (c >> 1) & 1);
    TRACE(c, 1);
    load_values(s, c & 1, reread(s.len) - c * kChunk, acc);
    const uint32_t ka = smem_u32(s.k[stage]), qa = smem_u32(s.q[stage]);
    {
      uint32_t as[32];
#pragma unroll
      for (int i = 0; i < 32; i++) as[i] = pack_bf16(-S[2 * i], -S[2 * i + 1]);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 8; j++)  // v - (k exp(G)) S
        wgmma<MmaN64>(acc, &as[4 * j], tile_desc(ka + (j / 4) * kHalf + (j % 4) * 32, 16, 1024));
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence_operands(acc);
    }
    TRACE(c, 2);
    const uint32_t ta = smem_u32(s.t[c & 1]), aa = smem_u32(s.aqk[c & 1]),
                   ga = smem_u32(s.g[stage]);
    pack_acc();
    fence_operands(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; j++)  // v_new = T (v - k S)
      wgmma<MmaN64>(acc, &av[4 * j], tile_desc(ta + j * 32, 16, 1024), j > 0);
    cute::warpgroup_commit_batch();
    if (carry_tid() % 128 == 0 && c > 0 && c + 1 < num_chunks) {
      tensor_store_wait_read();  // o(c-1) has left its buffer
      load_v(c + 1);
    }
    cute::warpgroup_wait<0>();
    fence_operands(acc);
    TRACE(c, 3);
    pack_acc();
    {
      uint32_t as[16];  // S once more, a half at a time: 32 registers fewer across v_new
      pack_state_again(S, as);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)  // o = Aqk v_new + (q exp(G)) S
        wgmma<MmaN64>(acc, &av[4 * j], tile_desc(aa + j * 32, 16, 1024), j > 0);
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma<MmaN64>(acc, &as[4 * j], tile_desc(qa + j * 32, 16, 1024));
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence_operands(acc);
      barrier_wait(&s.slabs_full[c & 1], (c >> 1) & 1);  // long complete: ends a scheduling block
      pack_state_again(S + 32, as);
      fence_operands(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)
        wgmma<MmaN64>(acc, &as[4 * j], tile_desc(qa + kHalf + j * 32, 16, 1024));
      cute::warpgroup_commit_batch();
    }
    TRACE(c, 4);
    {
      const float* decay = &s.decay[c & 1][2 * (carry_tid() % 4)];
#pragma unroll
      for (int j = 0; j < 16; j++) {
        float2 d = *reinterpret_cast<const float2*>(decay + 8 * j);
        S[4 * j] *= d.x, S[4 * j + 1] *= d.y, S[4 * j + 2] *= d.x, S[4 * j + 3] *= d.y;
      }
    }
    fence_operands(S);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; j++)  // S += (k exp(G_last - G))^T v_new
      wgmma<MmaN128>(S, &av[4 * j], tile_desc(ga + j * 2048, kHalf, 1024));
    cute::warpgroup_commit_batch();
    TRACE(c, 5);
    cute::warpgroup_wait<1>();
    fence_operands(acc);
    TRACE(c, 6);
    store_output(s, c, c + 1 == num_chunks, acc, params, map_o);
    TRACE(c, 7);
    cute::warpgroup_wait<0>();
    fence_operands(S);
    if (carry_tid() % 32 == 0) barrier_arrive(&s.ops_empty[stage]);
    TRACE(c, 8);
  }
  if (params.state_out) {
#pragma unroll
    for (int i = 0; i < 32; i++)
      *reinterpret_cast<float2*>(params.state_out + state_offset(params) + (i & 1) * 8 * kWidth +
                                 (i >> 1) * 8) = make_float2(S[2 * i], S[2 * i + 1]);
  }
  if (carry_tid() % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace deltic::gpu
