// KDA forward, K = V = 128: one CTA per (sequence, head), four warpgroups in a pipeline over chunks of 64 tokens:
// slabs | between slabs | state, state. README.md has the schedule.
#pragma once
#include "carry.cuh"
#include "merge.cuh"

namespace deltic::gpu {

// Named barriers; 1 and 2 belong to the carrying warpgroups.
enum Barrier { kTotalsDone = 3, kTablesDone, kScoresDone, kLevel8Done, kLevel16Done };

template <Gate kGate>
__device__ inline void prepare_slabs(Smem& s, const Params& params, const CUtensorMap* map_q,
                                     const CUtensorMap* map_k, const CUtensorMap* map_g, int head,
                                     int begin, int len) {
  const Lane ln;
  const int warp = threadIdx.x / 32, num_chunks = (len + kChunk - 1) / kChunk;
  auto load = [&](int c) {
    const int st = c % kStages;
    uint64_t* bar = &s.raw_full[st];
    barrier_expect(bar, 3 * kTile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      tensor_load(s.g[st] + h * kHalf, map_g, 64 * h, head, begin + c * kChunk, bar);
      tensor_load(s.k[st] + h * kHalf, map_k, 64 * h, head, begin + c * kChunk, bar);
      tensor_load(s.q[st] + h * kHalf, map_q, 64 * h, head, begin + c * kChunk, bar);
    }
  };
  GateParams gp = {};
  if constexpr (kGate == Gate::kBounded) {
    gp.slope = -expf(params.a_log[head]) * 1.4426950408889634f;
    gp.bound = params.lower_bound * 1.4426950408889634f;
  }
  if (threadIdx.x == 0)
    for (int c = 0; c < min(num_chunks, kStages); c++) load(c);
#pragma unroll 1
  for (int c = 0; c < num_chunks; c++) {
    const int stage = c % kStages, par = c & 1, rest = len - c * kChunk;
    float beta[2] = {};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = 16 * warp + 8 * j + ln.row;
      if (token < rest)
        beta[j] = __bfloat162float(
            params.beta[int64_t(begin + c * kChunk + token) * params.num_heads + head]);
    }
    TRACE(c, 0);
    barrier_wait(&s.raw_full[stage], (c / kStages) & 1);
    TRACE(c, 1);
    if (rest < kChunk) clear_rows<kGate>(s, stage, warp, rest, ln);
    SlabScores sc[2] = {};
    float qq[4] = {};
    walk_slabs<kGate>(s, stage, warp, gp, ln, sc, qq);
    TRACE(c, 2);
    if (c >= 2) {  // chunk c-2 has left the shared tiles
      barrier_wait(&s.ops_empty[(c - 2) % kStages], ((c - 2) / kStages) & 1);
      if (threadIdx.x == 0 && c + 1 < num_chunks) load(c + 1);
      __syncwarp();
    }
    TRACE(c, 3);
    named_sync(kTotalsDone, kSlabThreads);
    TRACE(c, 4);
    build_tables(s, par, threadIdx.x);
    TRACE(c, 5);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool valid = 16 * warp + 8 * j + ln.row < rest;
      beta[j] = valid
                    ? rcp_approx(1.f + exp2_approx(fminf(beta[j] * -1.4426950408889634f, 100.f)))
                    : 0.f;
    }
    finish_slabs(s, par, warp, sc, qq, beta, params.scale, ln);
    TRACE(c, 6);
    fence_async_proxy();  // what the merging stage leaves as it is goes to the tensor cores from here
    named_sync(kTablesDone, kSlabThreads);  // totals may be overwritten
    if (ln.id == 0) barrier_arrive(&s.slabs_full[par]);
    TRACE(c, 7);
  }
}

__device__ inline void merge_slabs(Smem& s, const Params& params, int len) {
  const Lane ln;
  const int p = threadIdx.x / 32 - kSlabThreads / 32, num_chunks = (len + kChunk - 1) / kChunk;
#pragma unroll 1
  for (int c = 0; c < num_chunks; c++) {
    const int stage = c % kStages, par = c & 1;
    TRACE(c, 0);
    barrier_wait(&s.slabs_full[par], (c >> 1) & 1);
    TRACE(c, 1);
    merge_scores<true>(s, stage, par, 3 - p, ln);
    merge_scores<false>(s, stage, par, p, ln);
    TRACE(c, 2);
    named_sync(kScoresDone, kMergeThreads);  // L blocks; nobody reads another slab's k S8 any more
    TRACE(c, 3);
    InverseRow high, low;
    inverse_level8<true>(s, par, 3 - p, ln, high);
    inverse_level8<false>(s, par, p, ln, low);
#pragma unroll 1
    for (int i = 0; i < 2; i++) finish_operands(s, stage, par, i ? p : 7 - p, ln);
    TRACE(c, 4);
    named_sync(kLevel8Done, kMergeThreads);  // t_block; nobody reads the scratch any more
    inverse_level16<true>(s, 3 - p, ln, high);
    inverse_level16<false>(s, p, ln, low);
    TRACE(c, 5);
    named_sync(kLevel16Done, kMergeThreads);
    store_inverse<false>(s, par, p, ln, low);
    store_inverse<true>(s, par, 3 - p, ln, high);
    fence_async_proxy();
    __syncwarp();
    if (ln.id == 0) barrier_arrive(&s.ops_full[stage]);
    TRACE(c, 6);
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
      barrier_init(&s.ops_full[i], kMergeThreads / 32);
      barrier_init(&s.ops_empty[i], kCarryThreads / 32);
    }
    for (int i = 0; i < 2; i++) barrier_init(&s.slabs_full[i], kSlabThreads / 32);
    for (int i = 0; i < 4; i++) barrier_init(&s.v_full[i / 2][i % 2], 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  for (int i = threadIdx.x; i < 2 * kHalf / 16; i += kThreads)
    reinterpret_cast<uint4*>(s.aqk)[i] = uint4{0, 0, 0, 0};
  if (kGate == Gate::kBounded && threadIdx.x < kWidth)
    s.bias[threadIdx.x] = -expf(params.a_log[head]) * 1.4426950408889634f *
                          params.dt_bias[head * kWidth + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < kSlabThreads) {
    cutlass::arch::warpgroup_reg_dealloc<kSlabRegs>();
    prepare_slabs<kGate>(s, params, &map_q, &map_k, &map_g, head, begin, len);
  } else if (threadIdx.x < kFirstCarry) {
    cutlass::arch::warpgroup_reg_dealloc<kMergeRegs>();
    merge_slabs(s, params, len);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kCarryRegs>();
    carry_state(s, params, &map_v, &map_o);
  }
}

}  // namespace deltic::gpu
