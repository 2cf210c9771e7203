// The gradients of a chunk, all chunks at once: a CTA takes (chunk, q/k head) after (chunk, q/k
// head) and goes over the head's value heads, whose dq and dk it adds up.
#pragma once

#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/stage_gates.cuh"
#include "cuda/sm90/backward/stage_states.cuh"

namespace deltic::gpu::gradient {

// Sums over lanes of several numbers at once: one's lanes are waited for with another's.
template <int kLanes, int N>
__device__ void sum_each(float (&x)[N]) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) {
    float other[N];
#pragma unroll
    for (int i = 0; i < N; ++i) other[i] = __shfl_xor_sync(0xFFFFFFFFu, x[i], m);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += other[i];
  }
}

// Rows of q and k with their norms, in place; the norms are kept for their gradients. Sums of
// squares in fp32, as prepare per channel has them: rows longer than 1e19 become 0. A thread has
// eight channels of a row, K / 8 neighbours the row. All of its rows of k, then those of q: all at
// once would be twice the code, each by itself would wait for its lanes.
template <class Tr>
__device__ void normalize_rows(GradientShared<Tr>& s) {
  using E = typename Tr::E;
  constexpr int kPieces = Tr::K / 8, kStep = Tr::kThreads / kPieces, kRows = kChunk / kStep;
  const int row = thread_index() / kPieces, c = thread_index() % kPieces * 8;
  static_assert(sizeof(s.k) == Tr::kKeyBytes);  // q is behind it
  unsigned char* at = s.k + place<64>(row, c);
#pragma unroll 1
  for (int side = 0; side < 2; ++side, at += Tr::kKeyBytes) {
    uint4 words[kRows];
    float norms[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[8];
      words[i] = *reinterpret_cast<const uint4*>(at + i * kStep * 128);
      unpack<E>(words[i], x);
      norms[i] = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) norms[i] = fmaf(x[e], x[e], norms[i]);
    }
    sum_each<kPieces>(norms);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[8];
      unpack<E>(words[i], x);
      const float norm = rsqrtf(norms[i] + float(kNormEps));
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] *= norm;
      *reinterpret_cast<uint4*>(at + i * kStep * 128) = pack_operands<E>(x);
      if (c == 0) s.norms[side][row + i * kStep] = norm;
    }
  }
}

// G of a thread's run of eight tokens, of two channels, and its sum to sum_parts. raw_of: of a
// token, as the call has it. A loop: as straight code the forms alone are pages that every chunk
// passes.
template <class Tr, class F>
__device__ void sum_gates(const Params& p, GradientShared<Tr>& s, const GatePlace<Tr>& at,
                          const ChannelGates& gates, int count, F&& raw_of) {
  float2* to = &pair_of(&s.G[at.first][at.channel]);
  float2 sum = {0, 0};
  const auto walk = [&](auto&& decay_of) {
#pragma unroll 2
    for (int i = 0; i < kRun; ++i, to += Tr::kPitch / 2) {
      sum = sum + decay_of(raw_of(i), i);
      *to = sum;
    }
  };
  if (p.gate_form == DELTIC_GATE_LOG_DECAY) {
    walk([](float2 g, int) { return float2{clamp_log_decay(g.x), clamp_log_decay(g.y)}; });
  } else {
    const float rate = gates.rate();
    if (at.run == 0) pair_of(&s.gate_bias[at.channel]) = {gates.bias[0], gates.bias[1]};
    if (thread_index() == 0) s.gate_rate = rate;
    with_form(p.gate_form, [&](auto kForm) {
      const ApproxGate<kForm> form(rate, p.lower_bound);
      walk([&](float2 g, int i) {
        const float x = form.log_decay(g.x + gates.bias[0]);
        const float y = form.log_decay(g.y + gates.bias[1]);
        return i < count ? float2{x, y} : float2{0, 0};  // 0 past the tokens
      });
    });
  }
  pair_of(&s.sum_parts[at.run][at.channel]) = sum;
}

// G of the chunk, per channel: runs of eight tokens, and what lies before a run added last. The
// parameters stay for the gradients. A barrier inside; one must follow.
template <class Tr>
__device__ void lay_gates(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                          int64_t head, const ChannelGates& gates) {
  const GatePlace<Tr> at;
  const int d = at.channel;
  if (at.is_there()) {
    const int count = tile.length - at.first;
    const auto sum = [&](auto&& raw_of) { sum_gates<Tr>(p, s, at, gates, count, raw_of); };
    if (p.g_bytes == 2) {  // in the place of dP and dM
      const uint32_t from = pair_place<64>(at.first, d);
      const auto word_of = [&](int i) {
        const auto byte = (from ^ static_cast<uint32_t>(i << 4)) + static_cast<uint32_t>(i * 128);
        return *reinterpret_cast<const uint32_t*>(s.dP + byte);
      };
      if (p.g.dtype == DType::bf16) {
        sum([&](int i) { return unpack<__nv_bfloat16>(word_of(i)); });
      } else {
        sum([&](int i) { return unpack<__half>(word_of(i)); });
      }
    } else if (p.g_bytes == 4) {
      // One pointer and an offset: of two pointers the compiler would not know the space.
      const int later = static_cast<int>(s.x.ahead.gates - s.dP) - kChunk / 2 * Tr::K * 4;
      const unsigned char* from =
          s.dP + ((at.first * Tr::K + d) * 4 + (at.run < kRuns / 2 ? 0 : later));
      sum([&](int i) { return *reinterpret_cast<const float2*>(from + i * (Tr::K * 4)); });
    } else {
      float g[kRun][2];
      load_gates(p, offset(p.g, tile.batch, tile.begin + at.first, head) + d, count, g);
      put_run<Tr>(&s.G[at.first][d], g);
      sum([&](int i) { return pair_of(&s.G[at.first + i][d]); });
    }
  }
  __syncthreads();  // sums of the runs
  if (!at.is_there()) return;
  float2 before = {0, 0};
#pragma unroll
  for (int i = 0; i < kRuns - 1; ++i) {
    if (i < at.run) before = before + pair_of(&s.sum_parts[i][d]);
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    float2& G = pair_of(&s.G[at.first + i][d]);
    G = before + G;
  }
}

// An item's tiles x and y of the workspace, under way. One thread, behind a barrier: what others
// wrote in their place comes before.
__device__ inline void load_tiles(uint64_t* full, int64_t item, int bytes, void* x,
                                  const void* from_x, void* y, const void* from_y) {
  fence_async_proxy();
  barrier_expect(full, 2 * bytes);
  bulk_load(x, static_cast<const char*>(from_x) + item * bytes, bytes, full);
  bulk_load(y, static_cast<const char*>(from_y) + item * bytes, bytes, full);
}

// Inputs of a value head, under way; with is_first q and k as well. turn: of its numbers. Raw gates
// take the place of dP and dM, which are free when a head's sums are complete; of four bytes those
// of the tokens from 32 on have one of their own.
template <class Tr>
__device__ void load_inputs(const Params& p, GradientShared<Tr>& s, const TokenTile& tile,
                            int64_t head, int64_t item, bool is_first, int turn) {
  using E = typename Tr::E;
  const int t = thread_index();
  auto& x = s.x.operand;
  if (t < static_cast<int>(sizeof(s.rows[0]) / 16)) {
    copy_async(&s.rows[turn][0][4 * t],
               p.work.rows + item * (kRowKinds * kChunk) + kBeta * kChunk + 4 * t);
  }
  if (is_first) {
    const int64_t key_head = key_head_of(p, head);
    unsigned char* to = s.k;  // q is behind it
#pragma unroll 1
    for (int side = 0; side < 2; ++side, to += Tr::kKeyBytes) {
      copy_rows<E, Tr::K, Tr::kThreads>(to, side == 0 ? p.k : p.q, tile.batch, tile.begin, key_head,
                                        0, tile.length, t);
    }
  }
  copy_rows<E, Tr::V, Tr::kThreads>(x.d_o, p.d_o, tile.batch, tile.begin, head, 0, tile.length, t);
  if (t == 0) {
    load_tiles(&s.full_inputs, item, Tr::kValueBytes, x.dz, p.work.dz, x.e, p.work.e);
  }
  if constexpr (Tr::kPerChannel) {
    static_assert(sizeof(s.dP) + sizeof(s.dM) >= Tr::kKeyBytes);
    if (p.g_bytes == 2) {
      copy_rows<uint16_t, Tr::K, Tr::kThreads>(s.dP, p.g, tile.batch, tile.begin, head, 0,
                                               tile.length, t);
    } else if (p.g_bytes == 4) {
      constexpr int kPieces = Tr::K / 4, kStep = Tr::kThreads / kPieces;  // rows at a time
      const int row = t / kPieces, c = t % kPieces * 4;
      const float* from =
          static_cast<const float*>(p.g.data) + offset(p.g, tile.batch, tile.begin + row, head) + c;
#pragma unroll
      for (int r = 0; r < kChunk; r += kStep, from += p.g.st * kStep) {
        unsigned char* to = r < kChunk / 2 ? s.dP : s.x.ahead.gates;
        copy_async_or_zero(to + ((row + r % (kChunk / 2)) * Tr::K + c) * 4, from,
                           row + r < tile.length);
      }
    }
  }
  copies_commit();
}
// And the states.
template <class Tr>
__device__ void load_states(const Params& p, GradientShared<Tr>& s, int64_t item) {
  auto& x = s.x.operand;
  if (thread_index() == 32 * (Tr::kWarps - 1)) {  // of a warp without a block of pairs
    load_tiles(&s.full_states, item, Tr::kStateBytes, x.S, p.work.S, x.dS, p.work.dS);
  }
}

// What the CTA reads next, to L2: shared memory has no room for it yet. Tiles of the workspace by
// a lane each; when the next chunk is known rows of gates, a line of 128 bytes a thread.
template <class Tr>
__device__ void prefetch_tiles(const Params& p, int64_t item) {
  int lane = thread_index() % 32;
  const auto prefetch = [&](const void* from, int bytes) {
    if (lane-- == 0) bulk_prefetch(static_cast<const char*>(from) + item * bytes, bytes);
  };
  prefetch(p.work.dz, Tr::kValueBytes), prefetch(p.work.e, Tr::kValueBytes);
  prefetch(p.work.S, Tr::kStateBytes), prefetch(p.work.dS, Tr::kStateBytes);
  prefetch(p.work.rows, kRowKinds * kChunk * 4);
  if (p.dbeta.present) prefetch(p.work.dz_rest, Tr::kValueBytes);
}
template <class Tr>
__device__ void prefetch_gates(const Params& p, const GradientShared<Tr>& s) {
  const TokenTile& tile = s.next_tile;
  const int r = thread_index() / 4, size = static_cast<int>(number_bytes(p.g.dtype));
  if (r >= tile.length) return;
  const char* at = static_cast<const char*>(p.g.data) +
                   offset(p.g, tile.batch, tile.begin + r, s.next_head) * size;
  const int byte = thread_index() % 4 * 128;
  if (byte < Tr::K * size) line_prefetch(at + byte);
}

// Without decays per channel dq and dk of the group's value heads so far stay as threads have them,
// in memory of the CTA's own: no other reads them.
template <class Tr>
using GroupSums = float4[2 * Tr::kTiles];
template <class Tr>
__device__ float4* group_sums_of(const Params& p) {
  return reinterpret_cast<float4*>(p.work.group_sums) +
         int64_t{blockIdx.x} * (2 * Tr::kTiles * Tr::kThreads) + thread_index();
}
template <class Tr>
__device__ void load_sums(const Params& p, GroupSums<Tr>& sums) {
  const float4* from = group_sums_of<Tr>(p);
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) sums[n] = from[n * Tr::kThreads];
}
template <class Tr>
__device__ void add_sums(const GroupSums<Tr>& sums, Fragment<Tr>& dq, Fragment<Tr>& dk) {
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) {
    float(&x)[4] = n < Tr::kTiles ? dq[n] : dk[n - Tr::kTiles];
    x[0] += sums[n].x, x[1] += sums[n].y, x[2] += sums[n].z, x[3] += sums[n].w;
  }
}
template <class Tr>
__device__ void store_sums(const Params& p, const Fragment<Tr>& dq, const Fragment<Tr>& dk) {
  float4* to = group_sums_of<Tr>(p);
#pragma unroll
  for (int n = 0; n < 2 * Tr::kTiles; ++n) {
    const float(&x)[4] = n < Tr::kTiles ? dq[n] : dk[n - Tr::kTiles];
    to[n * Tr::kThreads] = {x[0], x[1], x[2], x[3]};
  }
}

// A thread's eight channels of rows kStep apart, K / 8 neighbours a row.
template <class Tr>
struct RowPieces {
  static constexpr int kPieces = Tr::K / 8, kStep = Tr::kThreads / kPieces, kRows = kChunk / kStep;
  static_assert(kChunk % kStep == 0);
};
// Rows of q and k as the call has them, which the gradients of norms need, asked for ahead.
template <class Tr>
struct RawRows : RowPieces<Tr> {
  using RowPieces<Tr>::kPieces, RowPieces<Tr>::kStep, RowPieces<Tr>::kRows;
  uint4 q[kRows], k[kRows];
  __device__ void load(const Params& p, const TokenTile& tile, int64_t key_head) {
    using E = typename Tr::E;
    const int row = thread_index() / kPieces, c = thread_index() % kPieces * 8;
    const auto load = [&](const Rows& x, uint4(&to)[kRows]) {
      const E* from =
          static_cast<const E*>(x.data) + offset(x, tile.batch, tile.begin + row, key_head) + c;
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += x.st * kStep) {
        if (row + i * kStep < tile.length) to[i] = *reinterpret_cast<const uint4*>(from);
      }
    };
    load(p.q, q), load(p.k, k);
  }
};
// Gradients y of rows x through their norms r = 1 / sqrt(x x + 1e-6), of which `norms` has every
// kStep-th: dx = r (dy - r^2 x (x dy)). In fp32: dy has errors of 16-bit operands.
template <class Tr, int N>
__device__ void through_norms(const uint4 (&words)[N], const float* norms, float (&y)[N][8]) {
  using E = typename Tr::E;
  float dot[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x[8];
    unpack<E>(words[i], x);
    dot[i] = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) dot[i] = fmaf(x[e], y[i][e], dot[i]);
  }
  sum_each<RowPieces<Tr>::kPieces>(dot);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float r = norms[i * RowPieces<Tr>::kStep], along = dot[i] * r * r;
    float x[8];
    unpack<E>(words[i], x);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[i][e] = r * fmaf(-along, x[e], y[i][e]);
  }
}

// dq and dk of the chunk's rows: on the sums of the group's value heads so far, and out with the
// last one, through the norm.
template <class Tr>
__device__ void store_rows(const Params& p, const GradientShared<Tr>& s, const TokenTile& tile,
                           int64_t key_head, bool is_first, bool is_last, const RawRows<Tr>& raw) {
  using E = typename Tr::E;
  using Pieces = RowPieces<Tr>;
  constexpr int kStep = Pieces::kStep, kRows = Pieces::kRows;
  const int row = thread_index() / Pieces::kPieces, c = thread_index() % Pieces::kPieces * 8;
  float4* sum =
      reinterpret_cast<float4*>(p.work.group_sums + int64_t{blockIdx.x} * (2 * kChunk * Tr::K)) +
      2 * thread_index();
#pragma unroll 1
  for (int side = 0; side < 2; ++side, sum += 2 * kRows * Tr::kThreads) {
    const bool is_q = side == 0;
    const float* from = is_q ? &s.x.sum.dq[row][c] : &s.x.sum.dk[row][c];
    float y[kRows][8];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        *reinterpret_cast<float4*>(y[i] + n) =
            *reinterpret_cast<const float4*>(from + i * kStep * Tr::kPitch + n);
      }
      if (!(is_first && is_last)) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float4& to = sum[2 * i * Tr::kThreads + n];
          float4 z = is_first ? float4{0, 0, 0, 0} : to;
          z.x += y[i][4 * n], z.y += y[i][4 * n + 1];
          z.z += y[i][4 * n + 2], z.w += y[i][4 * n + 3];
          if (!is_last) to = z;
          y[i][4 * n] = z.x, y[i][4 * n + 1] = z.y, y[i][4 * n + 2] = z.z, y[i][4 * n + 3] = z.w;
        }
      }
    }
    const Rows& dx = is_q ? p.dq : p.dk;
    if (!is_last || !dx.present) continue;  // all threads
    if (p.l2norm) {
      uint4 words[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) words[i] = is_q ? raw.q[i] : raw.k[i];
      through_norms<Tr>(words, &s.norms[is_q][row], y);
    }
    const bool is_wide = is_q ? p.dq_vectors : p.dk_vectors;
    E* to = static_cast<E*>(dx.data) + offset(dx, tile.batch, tile.begin + row, key_head) + c;
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += dx.st * kStep) {
      if (row + i * kStep >= tile.length) continue;
      if (is_wide) {
        *reinterpret_cast<uint4*>(to) = gpu::pack<E>(y[i]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = from_float<E>(y[i][e]);
      }
    }
  }
}

// The tile after this one, by one thread. Whether it gets its inputs ahead: if it has any, and this
// one works.
template <class Tr>
__device__ void find_next(const Params& p, GradientShared<Tr>& s) {
  if (s.has_next && s.is_last) {
    s.next_tile = find_tile(p.tokens, static_cast<unsigned>(s.next_item) / p.HV);
  }
  s.is_next_loaded = s.has_next && s.tile.length > 0 && s.next_tile.length > 0;
}

template <class Tr>
__device__ void store_dbeta(const Params& p, const GradientShared<Tr>& s, const TokenTile& tile) {
  const int t = thread_index();
  if (t >= tile.length || !p.dbeta.present) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Tr::V / 64; ++i) sum += s.dbeta_parts[i][t];
  store(p.dbeta.data, p.dbeta.dtype, offset(p.dbeta, tile.batch, tile.begin + t, s.head),
        beta_gradient(p.beta_form, s.rows_of(kRawBeta)[t], sum));
}

// One value head of a chunk, which s says; phase: of its bulk copies. A barrier must follow.
template <class Tr>
__device__ void go_over_head(const Params& p, GradientShared<Tr>& s, uint32_t phase,
                             ChannelGates& gates) {
  const TokenTile& tile = s.tile;
  const bool has_form = Tr::kPerChannel && p.gate_form != DELTIC_GATE_LOG_DECAY;
  if (!s.is_loaded) {
    if (has_form) gates = ChannelGates(p, s.head, GatePlace<Tr>().channel);
    load_inputs<Tr>(p, s, tile, s.head, s.item, s.is_first, s.turn);
    copies_wait<0>();
    __syncthreads();  // inputs
  }
  barrier_wait(&s.full_inputs, phase);
  load_states<Tr>(p, s, s.item);
  Rest<Tr> rest = {};
  load_rest<Tr>(p, s, rest);
  const bool has_norms = s.is_first && p.l2norm;
  if (has_norms) normalize_rows<Tr>(s);
  if constexpr (Tr::kPerChannel) lay_gates<Tr>(p, s, tile, s.head, gates);
  gates = {};
  if (Tr::kPerChannel || has_norms) __syncthreads();  // rows with norms, G
  lay_pairs<Tr>(p, s);
  lay_dbeta<Tr>(p, s, rest);
  if (thread_index() >= 32 * (Tr::kWarps - 1)) {  // it has no block of pairs
    if (s.has_next) prefetch_tiles<Tr>(p, s.next_item);
    if (thread_index() % 32 == 0) find_next<Tr>(p, s);
  }
  barrier_wait(&s.full_states, phase);
  fence_async_proxy();  // what this thread wrote, or copied, of operands
  __syncthreads();      // dP, dM; the next tile
  Fragment<Tr> dq = {}, dk = {}, dG = {};
  begin_states<Tr>(s, dq, dk, dG);
  lay_last<Tr>(p, s, tile, s.head);
  end_states<Tr>(dq, dk, dG);
  apply_decays<Tr>(p, s, dq, dk, dG);
  __syncthreads();  // operands have been read
  if constexpr (Tr::kPerChannel) {
    if (s.is_next_loaded) prefetch_gates<Tr>(p, s);
    put_fragment<Tr>(s.x.sum.dq, dq);
#pragma unroll 1
    for (int level = 0; level < 2; ++level) {
      const bool is_row = (thread_index() / 32 & (2 >> level)) != 0;  // of the warp's block
      LevelOperands<Tr> own;
      lay_level<Tr>(s, level, is_row, own);
      Part<Tr>().sync_quarter();  // operands of the pairs
      is_row ? add_level<Tr, true>(s, level, own, dk, dG)
             : add_level<Tr, false>(s, level, own, dk, dG);
      Part<Tr>().sync_quarter();  // they have been read
    }
    add_middle<Tr>(s, dk, dG);
    put_fragment<Tr>(s.x.sum.dG, dG);
  } else {
    GroupSums<Tr> sums;
    if (!s.is_first) load_sums<Tr>(p, sums);
    add_pairs<Tr>(s, dq, dk);
    if (!s.is_first) add_sums<Tr>(sums, dq, dk);
    s.is_last ? put_fragment<Tr>(s.x.sum.dq, dq) : store_sums<Tr>(p, dq, dk);
  }
  if (Tr::kPerChannel || s.is_last) put_fragment<Tr>(s.x.sum.dk, dk);
  if constexpr (Tr::kPerChannel) {
    const Part<Tr> at;
    at.sync_quarter();                 // sums of the warpgroup's channels
    constexpr int kPairs = Tr::K / 8;  // of channels
    if (const int i = thread_index() % 128; i < 8 * kPairs) {
      add_inside<Tr>(s, i / kPairs * 8, at.first_column() + i % kPairs * 2);
    }
  }
  // The next head's parameters of gates, and what is read again, before it is waited for. It stays
  // in registers: the place that raw gates had is taken. Zeros before it is read, as elsewhere:
  // what has no value on some path takes its registers all the way around.
  float g[kRun][2] = {};
  if (has_form) {
    const GatePlace<Tr> at;
    if (s.is_next_loaded) gates = ChannelGates(p, s.next_head, at.channel);
    load_gates(p, offset(p.g, tile.batch, tile.begin + at.first, s.head) + at.channel,
               at.is_there() ? tile.length - at.first : 0, g);
  }
  if (Tr::kPerChannel || s.is_last) {
    RawRows<Tr> raw = {};
    if (p.l2norm && s.is_last) raw.load(p, tile, key_head_of(p, s.head));
    __syncthreads();  // sums with all pairs
    store_rows<Tr>(p, s, tile, key_head_of(p, s.head), !Tr::kPerChannel || s.is_first, s.is_last,
                   raw);
    __syncthreads();  // rows have been read
  }
  if (s.is_next_loaded) {
    load_inputs<Tr>(p, s, s.next_tile, s.next_head, s.next_item, s.is_last, s.turn ^ 1);
  }
  if constexpr (Tr::kPerChannel) {
    store_channel_gates<Tr>(p, s, tile, s.head, s.item, g);
  } else {
    store_head_gates<Tr>(p, s, tile, s.head, s.item);
  }
  store_dbeta<Tr>(p, s, tile);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gradients_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<GradientShared<Tr>*>(smem);
  begin_launch();
  if (is_wrong(p.tokens)) return;
  const auto num_items = static_cast<unsigned>(p.num_tiles * p.H);
  uint32_t phase = 0;
  ChannelGates gates;  // of the head that comes, where its inputs do
  if (thread_index() == 0) {
    barrier_init(&s.full_inputs, 1), barrier_init(&s.full_states, 1), fence_barrier_init();
    s.next_tile = find_tile(p.tokens, blockIdx.x / p.H), s.is_next_loaded = false;
    s.turn = 0;
  }
  if constexpr (!Tr::kPerChannel) {  // blocks above the diagonals stay so
    auto* to = reinterpret_cast<uint4*>(s.dP);
    static_assert(sizeof(s.dP) + sizeof(s.dM) == 2 * Tr::kThreads * 16);
    to[thread_index()] = to[Tr::kThreads + thread_index()] = {0, 0, 0, 0};
  }
  for (unsigned index = blockIdx.x; index < num_items; index += gridDim.x) {
    for (unsigned i = 0; i < p.group; ++i) {
      if (thread_index() == 0) {
        const auto head_of = [&](unsigned n) { return n % p.H * p.group; };
        s.tile = s.next_tile, s.is_loaded = s.is_next_loaded, s.turn ^= 1;
        s.head = head_of(index) + i, s.item = int64_t{index / p.H} * p.HV + s.head;
        s.is_first = i == 0, s.is_last = i + 1 == p.group;
        const unsigned after = index + gridDim.x;
        s.has_next = !s.is_last || after < num_items;
        s.next_head = s.is_last ? head_of(after) : s.head + 1;
        s.next_item = s.is_last ? int64_t{after / p.H} * p.HV + s.next_head : s.item + 1;
      }
      copies_wait<0>();
      __syncthreads();  // where the CTA works; inputs that were under way
      if (s.tile.length > 0) {
        go_over_head<Tr>(p, s, phase, gates);
        phase ^= 1;
      } else if (thread_index() == 0) {
        find_next<Tr>(p, s);
      }
      __syncthreads();  // everything has been read
    }
  }
}

}  // namespace deltic::gpu::gradient
