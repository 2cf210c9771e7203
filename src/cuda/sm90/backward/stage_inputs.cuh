// What a chunk's gradients are made of: copies under way, what comes next asked of L2, rows with
// their norms, G.
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

}  // namespace deltic::gpu::gradient
