// Packets for gates per head, or none. Warpgroups 0 and 1 of a preparing CTA form scores, every
// other chunk each; each warp of 2 and 3 loads and solves chunks of its own, so that eight
// inverses, chains of small products, are under way side by side and nothing waits for one.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/stage_load.cuh"

namespace deltic::gpu::forward {

// A warp: factors of the lane's two tokens; store(to, bits), to the ring or to shared memory.
template <class E, class Store>
__device__ inline void write_factors(const chunk::HeadScores& s, HeadFactors& f, Store store) {
  const int t = 2 * (thread_index() % 32), at = factor_place(t);
  const float2 g = *reinterpret_cast<const float2*>(&s.g_sum[t]);
  const float2 k = *reinterpret_cast<const float2*>(&s.k_scale[t]);
  const float2 q = *reinterpret_cast<const float2*>(&s.q_scale[t]);
  const float last = s.g_sum[kChunk - 1];
  auto write = [&](void* to, uint32_t x, uint32_t y) {
    store(to, x), store(static_cast<uint32_t*>(to) + 1, y);
  };
  auto write_pair = [&](float* to, float x, float y) {
    write(to, __float_as_uint(x), __float_as_uint(y));
  };
  const float2 to = make_float2(exp2_approx(g.x), exp2_approx(g.y));
  write_pair(&f.ks_factor[at], to.x * k.x, to.y * k.y);
  write_pair(&f.qs_factor[at], to.x * q.x, to.y * q.y);
  write_pair(&f.new_factor[at], s.beta[t], s.beta[t + 1]);
  const float x = exp2_approx(last - g.x) * k.x, y = exp2_approx(last - g.y) * k.y;
  if constexpr (kIsHalf<E>) {
    write_pair(reinterpret_cast<float*>(&f.v_new_factor[0][0]) + at, x, y);
  } else {
    const uint32_t high = pack_bf16(x, y);
    store(&f.v_new_factor[0][pair_place(t)], high);
    store(&f.v_new_factor[1][pair_place(t)], pack_bf16(x - bf16_lo(high), y - bf16_hi(high)));
  }
  if (t == 0) store(&f.decay, __float_as_uint(exp2_approx(last)));
}

// A warp: log2 decay and beta of the lane's two tokens, as head_rows has them; past the end no
// decay, beta 0.
struct GateRows {
  float2 row[2];
};
__device__ inline GateRows load_rows(const Params& params, int head, int batch, int token,
                                     int tokens_left) {
  const int lane = thread_index() % 32;
  const float2* const from = params.head_rows +
                             (int64_t(head) * params.num_batches + batch) * params.num_tokens +
                             token + 2 * lane;
  GateRows r{};
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (2 * lane + j < tokens_left) r.row[j] = __ldcg(from + j);
  return r;
}
// And what scores need of them.
__device__ inline void put_gates(chunk::HeadScores& to, const Params& params, const GateRows& r) {
  const int lane = thread_index() % 32;
  float sum = r.row[0].x + r.row[1].x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float x = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += x;
  }
  const float before = __shfl_up_sync(~0u, sum, 1);
  const float2 g = make_float2((lane ? before : 0.f) + r.row[0].x, sum);
  *reinterpret_cast<float2*>(&to.g_sum[2 * lane]) = g;
  *reinterpret_cast<float2*>(&to.beta[2 * lane]) = make_float2(r.row[0].y, r.row[1].y);
  if (!params.has_norm) {
    *reinterpret_cast<float2*>(&to.column[2 * lane]) = g;
    *reinterpret_cast<float2*>(&to.k_scale[2 * lane]) = make_float2(1.f, 1.f);
    *reinterpret_cast<float2*>(&to.q_scale[2 * lane]) = make_float2(params.scale, params.scale);
  }
}

// A warpgroup: scores of a chunk whose tiles and gates are there. Tiles are free when tiles_read()
// has run in a warp; Aqk's place is free after wait_aqk(). kPairs: registers for both products at a
// time, 64, or for one; kBlocks: of so many blocks of 16 x 16 at a time.
template <class E, int kPairs, int kBlocks, class TilesRead, class WaitAqk>
__device__ inline void score_chunk(chunk::HeadScores& work, uint8_t* tiles, uint8_t* aqk,
                                   int tokens_left, const Params& params, int barrier,
                                   TilesRead tiles_read, WaitAqk wait_aqk) {
  const int tid = thread_index() % kWarpgroup;
  if (tokens_left < kChunk) chunk::clear_tail(tiles, tokens_left, barrier);
  float pairs[kPairs];
  if constexpr (kPairs == 64)
    chunk::multiply_pairs<E>(tiles, pairs);
  else
    chunk::multiply_keys<E>(tiles, 0, pairs);
  if (params.has_norm && !params.is_transfer)
    chunk::query_squares<E>(tiles, tid / 32, chunk::Lane(tid), [&](int token, float x) {
      work.q_scale[token] = token < tokens_left ? params.scale * rsqrtf(x + 1e-6f) : params.scale;
    });
  wgmma_wait<0>();
  fence_operands(pairs);
  tiles_read();
  __syncwarp();
  if (params.has_norm) {
    chunk::put_norms(work, tokens_left, pairs);
    named_sync(barrier, kWarpgroup);  // scales of all tokens
  }
  chunk::put_keys<kBlocks>(work, pairs);
  if constexpr (kPairs < 64) {  // never a transfer's
    float queries[32];
    chunk::multiply_keys<E>(tiles, 1, queries);
    wgmma_wait<0>();
    fence_operands(queries);
    chunk::put_queries<E, kBlocks>(work, aqk, queries);
  } else if (!params.is_transfer) {  // a transfer has no o
    wait_aqk();
    chunk::put_queries<E, kBlocks>(work, aqk, pairs);
  }
  fence_async_proxy();
}

// Warpgroups 0 and 1.
template <class E>
__device__ inline void score_heads(HeadSmem& s, const Params& params, int num_items) {
  // Read anew: else addresses that depend on it are kept, and spilled.
  auto this_one = [] { return int(thread_index()) / kWarpgroup; };
  for (int i = thread_index() % kWarpgroup; i < kHalfBytes / 16;
       i += kWarpgroup)  // above the diagonal it stays zero
    reinterpret_cast<uint4*>(s.aqk[this_one()])[i] = uint4{0, 0, 0, 0};
  named_sync(kHeadScoreBarrier + this_one(), kWarpgroup);
#pragma unroll 1
  for (int n = this_one(); n < num_items; n += kScorers) {
    const int st = n % kRawTiles, tid = thread_index() % kWarpgroup;
    const int which = this_one(), barrier = kHeadScoreBarrier + which;
    HeadWork& work = s.work[n % kSolvers];
    // All warps of the other warpgroup have seen its chunk, so raw_full is not more than a phase
    // behind.
    barrier_wait(&s.turn[which], (n / kScorers & 1) ^ which ^ 1);
    barrier_wait(&s.raw_full[st], n / kRawTiles & 1);
    __syncwarp();  // all lanes have seen it
    if (tid % 32 == 0) barrier_arrive(&s.turn[which ^ 1]);
    const int tokens_left = work.where[n / kSolvers & 1].tokens_left;
    score_chunk<E, 64, 4>(
        work, s.raw[st], s.aqk[which], tokens_left, params, barrier,
        [&] {
          if (thread_index() % 32 == 0) barrier_arrive(&s.raw_empty[st]);
        },
        [&] { barrier_wait(&s.aqk_empty[this_one()], (n / kScorers & 1) ^ 1); });
    barrier_arrive(&s.l_full[n % kSolvers]);  // with Aqk; all lanes, for the race checker
    __syncwarp();
  }
}

// One thread: tiles of item n, when the items before it have theirs under way.
__device__ inline void load_tiles(HeadSmem& s, const Params& params, const InputMaps& maps, int n,
                                  const Where& w) {  // the carrier reads them again
  const int st = n % kRawTiles;
  while (reread(s.num_loaded) != n) {  // in order: a parity tells neighbours apart, no more
  }
  barrier_wait(&s.raw_empty[st], (n / kRawTiles & 1) ^ 1);
  uint64_t* const bar = &s.raw_full[st];
  barrier_expect(bar, params.is_transfer ? kTileBytes : 2 * kTileBytes);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    tensor_load<kEvictNormal>(s.raw[st] + 2 * h * kHalfBytes, maps.k, 64 * h, w.qk_head, w.token,
                              w.batch, bar);
    if (!params.is_transfer)
      tensor_load<kEvictNormal>(s.raw[st] + (2 * h + 1) * kHalfBytes, maps.q, 64 * h, w.qk_head,
                                w.token, w.batch, bar);
  }
  *const_cast<volatile int*>(&s.num_loaded) = n + 1;
}

// Warp `which` of eight: loads its chunks, and solves them.
template <class E>
__device__ inline void solve_heads(HeadSmem& s, const Params& params, InputMaps maps,
                                   int num_items) {
  auto which = [] { return int(thread_index()) / 32 - kWarpgroupWarps * kScorers; };
  auto work = [&]() -> HeadWork& { return s.work[which()]; };
  auto is_first = [] { return thread_index() % 32 == 0; };
  // Without a wait: it is the item's turn, and a place for its tiles is free.
  auto may_load = [&](int n) {
    return reread(s.num_loaded) == n &&
           barrier_test(&s.raw_empty[n % kRawTiles], (n / kRawTiles & 1) ^ 1);
  };
  // Item i of the warp: its gates, its tiles on their way. The item before is published ahead of
  // anything that is waited for here, which may need it; tiles that need no wait go first.
  auto begin = [&](int i) {
    const int n = which() + i * kSolvers;
    const bool is_item = n < num_items;
    GateRows rows{};
    if (is_item) {
      const bool has_tables = opaque(s.seat.plan.num_pieces) <= kTablePieces;
      const Where w = where_is(
          s, params, has_tables ? s.prefix : params.chunk_prefix,
          [&](int p) { return has_tables ? s.spans[p] : span_in_memory(params, p); }, n);
      rows = load_rows(params, w.head, w.batch, w.token, w.tokens_left);
      if (is_first()) work().where[i & 1] = w;
    }
    if (is_first()) {
      bool is_left = is_item;
#pragma unroll 1
      for (int pass = 0; pass < 2; pass++) {  // one code for both
        if (is_left && (pass > 0 || may_load(n)))
          load_tiles(s, params, maps, n, work().where[i & 1]), is_left = false;
        if (pass == 0 && i > 0) {  // T has been read
          const Where& before = work().where[(i - 1) & 1];
          publish(params, before.carrier, before.step);
        }
      }
    }
    __syncwarp();
    if (!is_item) return;
    put_gates(work(), params, rows);
    arrive_item(&s.raw_full[n % kRawTiles]);
  };
  begin(0);
#pragma unroll 1
  for (int i = 0; which() + i * kSolvers < num_items; i++) {
    const chunk::Lane ln(thread_index());
    const int scorer = which() % kScorers;
    const Where& where = work().where[i & 1];
    auto& packet = packet_at<GateKind::kHead>(params, where.carrier, where.step)->body;
    wait_place(params, s.seat.plan, where.carrier, where.step,  // while tiles are on their way
               packets_read(params, s.seat.plan, where.carrier));
    barrier_wait(&s.l_full[which()], i & 1);
    if (is_first() && !params.is_transfer) bulk_store(packet.solved.aqk, s.aqk[scorer], kHalfBytes);
    __syncwarp();
    write_factors<E>(work(), packet.factors, [](void* to, uint32_t x) { store_packet(to, x); });
    if (is_first() && !params.is_transfer) {
      bulk_store_wait_read();
      barrier_arrive(&s.aqk_empty[scorer]);
    }
    __syncwarp();
    chunk::invert_stairs(work().l, ln);
    chunk::put_solved<E>(work(), ln);
    fence_async_proxy();
    __syncwarp();  // T is complete
    if (is_first()) bulk_store(packet.solved.t, work().tile, kHalfBytes);
    __syncwarp();
    begin(i + 1);
  }
}

}  // namespace deltic::gpu::forward
