// The same for gates per channel, by the six levels of the forward's chunk (chunk/levels.cuh): a
// thread has sixteen tokens of two channels, and decays are products along its registers. A CTA
// has a chunk of one value head; two fit an SM, and one's waits are the other's work.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/backward/prepare.cuh"
#include "cuda/sm90/chunk/levels.cuh"
#include "cuda/sm90/chunk/scores.cuh"

namespace deltic::gpu::gradient {

template <class E_, int K_>
struct ChannelTraits {
  using E = E_;
  static constexpr int K = K_, kHalves = K / 64;  // of 64 channels: a warpgroup's threads each
  static constexpr int kThreads = kHalves * kWarpgroup, kKeyBytes = kChunk * K * 2;
};
inline constexpr int kLevels = 6, kBlocks = 4;  // blocks of sixteen tokens

// beta k k^T, then its inverse; the scores; and what their entries are multiplied by.
struct ChannelScores {
  float l[kChunk * chunk::kPitch];
  alignas(128) unsigned char aqk[kChunk * kChunk * 2];  // a tile; zero above the diagonal
  float k_norm[kChunk];                                 // 1 / |k|; 1 without norm
  float k_row[kChunk], q_row[kChunk];                   // beta / |k|, scale / |q|
  template <class E>
  __device__ float l_factor(int row, int col) const {
    return k_row[row] * k_norm[col];
  }
  template <class E>
  __device__ float aqk_factor(int row, int col) const {
    return q_row[row] * k_norm[col];
  }
};
template <class Tr>
struct ChannelShared {
  using Level = chunk::LevelOf<Tr::kHalves>;
  alignas(1024) unsigned char k[Tr::kKeyBytes];  // then k E
  unsigned char q[Tr::kKeyBytes];                // behind it; then scale q E
  // By turns; raw gates before them, k R behind them in the first.
  alignas(1024) Level level[2];
  static_assert(sizeof(Level) >= Tr::kKeyBytes);
  ChannelScores scores;
  float total[kBlocks][Tr::K];  // decays of whole blocks
  float beta[kChunk];
  // Sequences in segments: of tokens, |k|^2 and the slowest channel of 64; of halves, the bound.
  float square[kChunk], slowest[Tr::kHalves][kChunk], bounds[2];
};

// Where a thread's tokens are in a tile, or kBytes behind it. Tiles are aligned, so that swizzling
// is one instruction.
template <int kBytes = 0>
struct TokensOfTile {
  uint32_t first;
  __device__ uint32_t place(int t) const {
    return (first ^ static_cast<uint32_t>((t & 7) << 4)) + t * 128 + kBytes;
  }
  // Read again for every level: registers are for the decays. The compiler may do that early, as
  // nothing overwrites them before put_operands; `first` is new in every level, or it would keep
  // them.
  __device__ uint32_t operator[](int t) const { return load_shared_unordered(place(t)); }
};
// A thread's tokens and channels: computed again wherever they are wanted.
template <class Tr>
struct ChannelPlace {
  int block, half, channel;  // of sixteen tokens, of 64 channels; the first of two
  uint32_t lane4;            // bytes from the half's first channel
  __device__ ChannelPlace() {
    const int thread = thread_index(), warp = thread / 32;
    block = warp / Tr::kHalves, half = warp % Tr::kHalves, channel = 64 * half + thread % 32 * 2;
    lane4 = static_cast<uint32_t>(thread % 32 * 4);
  }
  __device__ TokensOfTile<> of(const void* tile) const {
    return {smem_u32(tile) + (half * kChunk + 16 * block) * 128 + lane4};
  }
};
template <class Tr>
struct ChannelRows {
  TokensOfTile<> k;
  TokensOfTile<Tr::kKeyBytes> q;
  float fs[16][2], te[16][2];  // as in chunk::Rows
};

// From raw gates log decays, clamped. Forms with exponentials are a loop over shared memory
// (`place`, `pitch` apart, the thread's own): straight code would fill the instruction cache. Eight
// gates at a time, so that special functions overlap.
__device__ inline void to_log_decays(const Params& p, const ChannelGates& gates, int count,
                                     float2* place, int pitch, float (&g)[16][2]) {
  if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      g[t][0] = clamp_log_decay(g[t][0]), g[t][1] = clamp_log_decay(g[t][1]);
    }
    return;
  }
#pragma unroll
  for (int t = 0; t < 16; ++t) place[t * pitch] = {g[t][0], g[t][1]};
  with_form(p.gate_form, [&](auto kForm) {
    const ApproxGate<kForm> form(gates.rate(), p.lower_bound);
    float2* at = place;
#pragma unroll 1
    for (int n = 0; n < 16; n += 4, at += 4 * pitch) {
      float2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = at[i * pitch];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = {form.log_decay(x[i].x + gates.bias[0]), form.log_decay(x[i].y + gates.bias[1])};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) at[i * pitch] = x[i];
    }
  });
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float2 x = place[t * pitch];
    g[t][0] = t < count ? x.x : 0.0f, g[t][1] = t < count ? x.y : 0.0f;
  }
}

// Of sixteen tokens the slowest of the warp's 64 channels; infinity where one is NaN.
__device__ inline void find_slowest(const float (&g)[16][2], float* slowest) {
  const int lane = thread_index() % 32;
  int mine = 0;
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    float x = fmaxf(g[t][0], g[t][1]);
    if (isnan(g[t][0]) || isnan(g[t][1])) x = INFINITY;
    const int bits = __float_as_int(x);  // in the order of numbers
    const int most = __reduce_max_sync(0xFFFFFFFFu, bits < 0 ? bits ^ 0x7FFFFFFF : bits);
    if (lane == t) mine = most < 0 ? most ^ 0x7FFFFFFF : most;
  }
  if (lane < 16) slowest[lane] = __int_as_float(mine);
}
// By two warps: see lay_bounds. A barrier is before it, and one must follow.
template <class Tr>
__device__ void bound_chunk(const Params& p, ChannelShared<Tr>& s) {
  const int r = thread_index();
  float slowest = s.slowest[0][r];
#pragma unroll
  for (int half = 1; half < Tr::kHalves; ++half) slowest = fmaxf(slowest, s.slowest[half][r]);
  const float bound = warp_sum(bound_of_token(p, s.beta[r], s.square[r]) + slowest * kLog2e);
  if (r % 32 == 0) s.bounds[r / 32] = bound;
}

// Norms and factors of entries, by a warpgroup; the diagonal of the scores.
template <class Tr>
__device__ void lay_factors(const Params& p, ChannelShared<Tr>& s) {
  using E = typename Tr::E;
  const chunk::Lane lane(thread_index());
  const auto use = [&](int token, float kk, float qq, float qk) {
    const float rk = p.l2norm ? rsqrtf(kk + float(kNormEps)) : 1.0f;
    const float rq = p.l2norm ? rsqrtf(qq + float(kNormEps)) : 1.0f;
    s.scores.k_norm[token] = rk;
    s.scores.k_row[token] = s.beta[token] * rk, s.scores.q_row[token] = p.scale * rq;
    s.square[token] = kk;
    *reinterpret_cast<uint16_t*>(s.scores.aqk + pair_place<64>(token, token & ~1) +
                                 2 * (token & 1)) =
        static_cast<uint16_t>(pack<E>(qk * (p.scale * rq * rk), 0.0f));
  };
  chunk::token_diagonals<E, Tr::kHalves>(s.k, s.q, thread_index() / 32 % 4, lane, use);
}

// A level's product, by each warpgroup, which then puts a half of its entries to their places: in
// branches of their own products would wait for one another.
template <class Tr, int kLevel>
__device__ void multiply_level(ChannelShared<Tr>& s) {
  using E = typename Tr::E;
  const auto& level = s.level[kLevel % 2];
  const uint64_t a = tile_desc(smem_u32(level.rows), 16, 1024);
  const uint64_t b = tile_desc(smem_u32(level.columns), 16, 1024);
  float acc[16];
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < Tr::K / 16; ++j) {
    const auto at = static_cast<uint32_t>(j % 4 * 32);
    wgmma<E, Major::k, Major::k>(acc, desc_at(a, at + j / 4 * 8192), desc_at(b, at + j / 4 * 4096),
                                 j > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_operands(acc);
  const int group = thread_index() / kWarpgroup, warp = thread_index() / 32 % 4;
  const chunk::Lane lane(thread_index());
  if constexpr (kLevel == 5 && Tr::kHalves == 2) {
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = group == 0 ? acc[i] : acc[8 + i];
    chunk::put_level32<E>(s.scores, sums, warp, lane, 16 * group);
  } else if constexpr (kLevel == 5) {
    chunk::put_level32<E>(s.scores, acc, warp, lane);
  } else if (Tr::kHalves == 1 || (warp & 1) == group) {
    if constexpr (kLevel < 4) {
      chunk::put_local_level<E>(s.scores, acc, kLevel, warp, lane);
    } else {
      chunk::put_level16<E>(s.scores, acc, warp, lane);
    }
  }
}

// Operands of a level, by all threads. Places are computed anew in each branch, or they would all
// be there at once.
template <class Tr, int kLevel>
__device__ void fill_level(ChannelShared<Tr>& s, ChannelRows<Tr>& r) {
  using E = typename Tr::E;
  auto& level = s.level[kLevel % 2];
  const auto begin = [&] {
    const ChannelPlace<Tr> place;
    r.k.first = r.q.first = place.of(s.k).first;
    return place;
  };
  const auto rows = [&](const ChannelPlace<Tr>& at, int row) {
    return smem_u32(level.rows) + at.half * 8192 + row * 128;
  };
  const auto columns = [&](const ChannelPlace<Tr>& at, int row) {
    return smem_u32(level.columns) + at.half * 4096 + row * 128;
  };
  if constexpr (kLevel < 4) {
    const ChannelPlace<Tr> at = begin();
    chunk::local_level<E, true, 1 << kLevel>(r, rows(at, 8 * at.block), columns(at, 8 * at.block),
                                             at.lane4);
    // Decays as they are now: put off, their products would need more registers than there are.
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      keep_here(r.fs[t][0], r.fs[t][1]);
      if ((t + 1) % (2 << kLevel) != 0) keep_here(r.te[t][0], r.te[t][1]);
    }
    if constexpr (kLevel == 3) {
      *reinterpret_cast<float2*>(&s.total[at.block][at.channel]) = {r.fs[15][0], r.fs[15][1]};
    }
  } else {
    // Blocks 1 and 3, then 2 and 3 are rows. The one away from the boundary has the other's total
    // as factor.
    constexpr bool kFar = kLevel == 5;
    const auto factor = [&](const ChannelPlace<Tr>& at, int outer, int inner) -> float2 {
      if (!kFar || at.block != outer) return {1.0f, 1.0f};
      return *reinterpret_cast<const float2*>(&s.total[inner][at.channel]);
    };
    const auto row = [](int block) { return kFar ? 16 * (block & 1) : 8 * (block & 2); };
    if (thread_index() / (32 * Tr::kHalves) & (kFar ? 2 : 1)) {
      const ChannelPlace<Tr> at = begin();
      chunk::far_rows<E, true>(r, factor(at, 3, 2), rows(at, row(at.block)), at.lane4);
    } else {
      const ChannelPlace<Tr> at = begin();
      chunk::far_columns<E>(r, factor(at, 0, 1), columns(at, row(at.block)), at.lane4);
    }
  }
}
// All levels, one after the other: a product beside the next one's operands would need more
// registers than there are, and the other CTA's warps go on meanwhile. The two places take turns,
// so that a level's operands need not wait until all have multiplied the one before.
template <class Tr, int kLevel = 0>
__device__ void multiply_levels(const Params& p, ChannelShared<Tr>& s, ChannelRows<Tr>& r) {
  fill_level<Tr, kLevel>(s, r);
  fence_async_proxy();
  __syncthreads();  // the level's operands; norms, factors and slowest channels
  multiply_level<Tr, kLevel>(s);
  if constexpr (kLevel == 0) {
    if (p.segment > 0 && thread_index() < kChunk) bound_chunk(p, s);
  }
  if constexpr (kLevel + 1 < kLevels) multiply_levels<Tr, kLevel + 1>(p, s, r);
}

// k E, scale q E and k R, rounded once: the first two where k and q were, which the thread alone
// reads from now on.
template <class Tr>
__device__ void put_operands(ChannelShared<Tr>& s, const ChannelRows<Tr>& r) {
  using E = typename Tr::E;
  const ChannelPlace<Tr> place;
  const int block = place.block;
  float2 before = {1.0f, 1.0f}, after = before;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const float2 f = *reinterpret_cast<const float2*>(&s.total[i][place.channel]);
    if (i < block) before.x *= f.x, before.y *= f.y;
    if (i > block) after.x *= f.x, after.y *= f.y;
  }
  const TokensOfTile<> keys = place.of(s.k), ends = place.of(&s.level[0]);
  const TokensOfTile<Tr::kKeyBytes> queries{keys.first};
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float norm = s.scores.k_norm[16 * block + t], query = s.scores.q_row[16 * block + t];
    float2 k = unpack<E>(load_shared(keys.place(t)));
    const float2 q = unpack<E>(load_shared(queries.place(t)));
    k.x *= norm, k.y *= norm;
    const float2 start = {r.fs[t][0] * before.x, r.fs[t][1] * before.y};
    const float2 end = t < 15 ? float2{r.te[t][0] * after.x, r.te[t][1] * after.y} : after;
    store_shared(keys.place(t), pack<E>(k.x * start.x, k.y * start.y));
    store_shared(queries.place(t), pack<E>(q.x * query * start.x, q.y * query * start.y));
    store_shared(ends.place(t), pack<E>(k.x * end.x, k.y * end.y));
  }
}
// Operands and scores leave, by one thread, which waits for them before it ends.
template <class Tr>
__device__ void send_operands_of(const Params& p, const ChannelShared<Tr>& s, int64_t item) {
  const auto send = [&](void* to, const void* from, int bytes) {
    bulk_store<kEvictNormal>(static_cast<unsigned char*>(to) + item * bytes, from, bytes);
  };
  send(p.work.kE, s.k, Tr::kKeyBytes);
  send(p.work.qE, s.q, Tr::kKeyBytes);
  send(p.work.kR, &s.level[0], Tr::kKeyBytes);
  send(p.work.P, s.scores.aqk, kChunk * kChunk * 2);
}

// What the call has of the chunk: k and q on their way, betas, log decays.
template <class Tr>
__device__ void load_chunk(const Params& p, ChannelShared<Tr>& s, const TokenTile& tile,
                           int64_t head, int64_t item, float (&g)[16][2]) {
  using E = typename Tr::E;
  const auto [block, half, channel, lane4] = ChannelPlace<Tr>();
  const int thread = thread_index(), count = tile.length - 16 * block;
  const ChannelGates gates(p, head, channel);
  copy_rows<E, Tr::K, Tr::kThreads>(s.k, p.k, tile.batch, tile.begin, key_head_of(p, head), 0,
                                    tile.length, thread);
  copy_rows<E, Tr::K, Tr::kThreads>(s.q, p.q, tile.batch, tile.begin, key_head_of(p, head), 0,
                                    tile.length, thread);
  copies_commit();
  load_gates(p, offset(p.g, tile.batch, tile.begin + 16 * block, head) + channel, count, g);
  for (int i = thread; i < kChunk * kChunk / 8; i += Tr::kThreads) {
    reinterpret_cast<uint4*>(s.scores.aqk)[i] = {0, 0, 0, 0};
  }
  if (thread < kChunk) {
    const float raw = raw_of(p.beta, tile, head, thread), beta = beta_of(p, tile, raw, thread);
    float* rows = p.work.rows + item * (kRowKinds * kChunk) + thread;
    s.beta[thread] = beta;
    rows[kBeta * kChunk] = beta, rows[kInverse * kChunk] = 1 / beta, rows[kRawBeta * kChunk] = raw;
  }
  unpack_gates(p, g);
  to_log_decays(p, gates, count, reinterpret_cast<float2*>(s.level) + thread, Tr::kThreads, g);
  if (p.segment > 0) find_slowest(g, &s.slowest[half][16 * block]);
#pragma unroll
  for (int t = 0; t < 16; ++t) g[t][0] = exp_of(g[t][0]), g[t][1] = exp_of(g[t][1]);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 4 / Tr::kHalves)
    prepare_channels_kernel(const __grid_constant__ Params p) {
  using E = typename Tr::E;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<ChannelShared<Tr>*>(smem);
  begin_launch();
  if (is_wrong(p.tokens)) return;
  clear_handed(p);
  const int64_t item = blockIdx.x;
  const int warp = thread_index() / 32;
  ChannelRows<Tr> r;
  {
    const TokenTile tile = find_tile(p.tokens, blockIdx.x / p.HV);
    if (tile.length == 0) return;
    load_chunk<Tr>(p, s, tile, blockIdx.x % p.HV, item, r.fs);
  }
  copies_wait<0>();
  __syncthreads();  // k, q, betas; zeros of the scores
  if (warp / 4 == Tr::kHalves - 1) lay_factors<Tr>(p, s);
  multiply_levels<Tr>(p, s, r);
  put_operands<Tr>(s, r);
  fence_async_proxy();
  __syncthreads();             // L, scores and operands are complete
  constexpr int kSender = 64;  // of a warp that does not invert
  if (thread_index() == kSender) send_operands_of<Tr>(p, s, item);
  if (const int d = thread_index(); d < Tr::K) {
    const float(&x)[kBlocks][Tr::K] = s.total;
    p.work.last[item * Tr::K + d] = x[0][d] * x[1][d] * (x[2][d] * x[3][d]);
  }
  constexpr int kInvertBarrier = 1;
  if (warp < 2) {
    chunk::invert_in_place<kInvertBarrier>(s.scores.l, 0);
    if (thread_index() == 0 && p.segment > 0) p.work.bound[item] = s.bounds[0] + s.bounds[1];
  }
  __syncthreads();  // the inverse
  store_result<E, Tr::kThreads>(s.scores.l, static_cast<E*>(p.work.T) + item * (kChunk * kChunk));
  if (thread_index() == kSender) bulk_store_wait();
}

}  // namespace deltic::gpu::gradient
