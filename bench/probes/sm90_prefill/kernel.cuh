// KDA forward, K = V = 128: one CTA per (sequence, head). Two warpgroups work inside the 8-token
// slabs of chunk c+1, two merge the slabs of chunk c and carry the state through it. README.md has
// the schedule.
#pragma once
#include "carry.cuh"

namespace deltic::gpu {

enum SlabBarrier { kTotalsDone = 3, kTablesDone };

template <Gate kGate>
__device__ inline void prepare_slabs(Smem& s, const Params& params, const CUtensorMap* map_q,
                                     const CUtensorMap* map_k, const CUtensorMap* map_g) {
  const int num_chunks = (s.len + kChunk - 1) / kChunk;
  auto load = [&](int c) {
    const int st = c % kStages, head = reread(s.head), token = reread(s.begin) + c * kChunk;
    uint64_t* bar = &s.raw_full[st];
    barrier_expect(bar, 3 * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      tensor_load(s.g[st] + h * kHalf, map_g, 64 * h, head, token, bar);
      tensor_load(s.k[st] + h * kHalf, map_k, 64 * h, head, token, bar);
      tensor_load(s.q[st] + h * kHalf, map_q, 64 * h, head, token, bar);
    }
  };
  GateParams gp = {};
  if constexpr (kGate == Gate::kBounded) {
    gp.slope = -expf(params.a_log[s.head]) * 1.4426950408889634f;
    gp.bound = params.lower_bound * 1.4426950408889634f;
  }
  if (threadIdx.x == 0)
    for (int c = 0; c < min(num_chunks, kStages); c++) load(c);
#pragma unroll 1
  for (int c = 0; c < num_chunks; c++) {
    const int stage = c % kStages, par = c & 1;
    const int tid = thread_index(), w = tid / 32;
    const Lane ln(tid);
    TRACE(c, 0);
    barrier_wait(&s.raw_full[stage], (c / kStages) & 1);
    TRACE(c, 1);
    {
      const int rest = reread(s.len) - c * kChunk;
      if (rest < kChunk) clear_rows<kGate>(s, stage, w, rest, ln);
    }
    SlabScores sc[2] = {};
    walk_slab<kGate>(s, stage, w, gp, ln, sc);
    TRACE(c, 2);
    float beta = 0.f;
    const int token = c * kChunk + 8 * w + ln.row;
    if (token < reread(s.len))
      beta = __bfloat162float(
          params.beta[int64_t(reread(s.begin) + token) * params.num_heads + reread(s.head)]);
    if (c >= 2) {  // chunk c-2 has left the shared tiles
      barrier_wait(&s.ops_empty[(c - 2) % kStages], ((c - 2) / kStages) & 1);
      if (threadIdx.x == 0 && c + 1 < num_chunks) load(c + 1);
      __syncwarp();
    }
    TRACE(c, 3);
    named_sync(kTotalsDone, kSlabThreads);
    TRACE(c, 4);
    build_tables(s, par, tid);
    TRACE(c, 5);
    if (token < reread(s.len))
      beta = rcp_approx(1.f + exp2_approx(fminf(beta * -1.4426950408889634f, 100.f)));
    finish_slab(s, par, w, sc[0], beta, params.scale, ln);
    TRACE(c, 6);
    fence_async_proxy();  // what the merging stage leaves as it is goes to the tensor cores from
                          // here
    named_sync(kTablesDone, kSlabThreads);  // totals may be overwritten
    if (ln.id == 0) barrier_arrive(&s.slabs_full[par]);
    TRACE(c, 7);
  }
}

template <Gate kGate>
__global__ __launch_bounds__(kThreads, 1) void kda_prefill(
    const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_g,
    const __grid_constant__ CUtensorMap map_o, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  const int head = blockIdx.x % params.num_heads, seq = blockIdx.x / params.num_heads;
  const int begin = params.cu_seqlens[seq], len = params.cu_seqlens[seq + 1] - begin;
  if (threadIdx.x == 0) {
    s.head = head, s.begin = begin, s.len = len;
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.raw_full[i], 1);
      barrier_init(&s.ops_empty[i], kCarryThreads / 32);
    }
    for (int i = 0; i < 2; i++) barrier_init(&s.slabs_full[i], kSlabThreads / 32);
    for (int i = 0; i < 4; i++) barrier_init(&s.v_full[i / 2][i % 2], 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  for (int i = threadIdx.x; i < 2 * kHalf / 16; i += kThreads)
    reinterpret_cast<uint4*>(s.aqk)[i] = uint4{0, 0, 0, 0};
  if (kGate == Gate::kBounded && threadIdx.x < kWidth) {
    const int ch = threadIdx.x, it = ch / 64 * 2 + ch % 16 / 8, x = ch % 64 / 16;
    s.bias[32 * it + 16 * (ch % 8 / 4) + 4 * x + ch % 4] =
        -expf(params.a_log[head]) * 1.4426950408889634f * params.dt_bias[head * kWidth + ch];
  }
  __syncthreads();
  if (threadIdx.x < kSlabThreads) {
    cutlass::arch::warpgroup_reg_dealloc<kSlabRegs>();
    prepare_slabs<kGate>(s, params, &map_q, &map_k, &map_g);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kCarryRegs>();
    carry_state(s, params, &map_v, &map_o);
  }
}

}  // namespace deltic::gpu
