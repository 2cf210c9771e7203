// Shared memory of a CTA of the gradients, and who has what of a chunk.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tiles.cuh"

namespace deltic::gpu::gradient {

template <class E_, int K_, int V_, bool kPerChannel_>
struct GradientTraits {
  using E = E_;
  static constexpr int K = K_, V = V_;
  static constexpr bool kPerChannel = kPerChannel_;
  static constexpr int kThreads = 512, kWarps = 16;
  static constexpr int kTiles = K / 32;  // accumulators of 16 x 8 that a warp has of 64 x K
  static constexpr int kPitch = K + 8;   // of fp32 tiles: pairs by lanes hit every bank once
  static constexpr int kParts = 8;       // of the sum over values of S dS
  static constexpr int kValueBytes = kChunk * V * 2, kKeyBytes = kChunk * K * 2;
  static constexpr int kStateBytes = V * K * 2;
  static constexpr int kValuePieces = kValueBytes / 16 / kThreads;  // a thread's of do, dz or e
  static_assert(K % 64 == 0 && V % 64 == 0);
};

// Operands of the products with states. Then, when those are done, operands of pairs across blocks
// of sixteen tokens and sums in fp32. The next head's do, dz and e arrive in the place of dk and dq
// when these are stored, while dG is still read.
template <class Tr>
union Exchange {
  struct {
    unsigned char d_o[Tr::kValueBytes], dz[Tr::kValueBytes], e[Tr::kValueBytes];
    unsigned char S[Tr::kStateBytes], dS[Tr::kStateBytes];
  } operand;
  // dG is behind what arrives ahead.
  static constexpr int kSumBytes = kChunk * Tr::kPitch * 4;
  static constexpr int kAhead = 3 * Tr::kValueBytes - 2 * kSumBytes;
  struct Sum {
    float dk[kChunk][Tr::kPitch], dq[kChunk][Tr::kPitch];
    unsigned char gap[kAhead > 0 ? kAhead : 16];
    float dG[kChunk][Tr::kPitch];
  } sum;
  // Raw gates of four bytes, of the tokens from 32 on: behind the operands, which arrive later, and
  // behind dG.
  struct {
    unsigned char before[sizeof(operand) > sizeof(Sum) ? sizeof(operand) : sizeof(Sum)];
    alignas(16) unsigned char gates[Tr::kPerChannel ? kChunk / 2 * Tr::K * 4 : 16];
  } ahead;
  // k and q times the decay between the token and a boundary, after token 31 (level 0) or after
  // tokens 15 and 47 (level 1), one level after the other. Of q the tokens after a boundary alone:
  // rows 32 to 63, or 16 to 31 and 48 to 63, as 32 rows. Apart from the sums: warpgroups, each with
  // a quarter of the channels, do not wait for one another.
  struct {
    Sum sums;
    alignas(128) unsigned char k[Tr::kPerChannel ? Tr::kKeyBytes : 16];
    unsigned char q[Tr::kPerChannel ? Tr::kKeyBytes / 2 : 16];
  } level;
};

// Gates per channel, a thread: two channels of so many tokens.
inline constexpr int kRun = 8, kRuns = kChunk / kRun;

template <class Tr>
struct GradientShared {
  alignas(1024) Exchange<Tr> x;
  alignas(1024) unsigned char k[Tr::kKeyBytes], q[Tr::kKeyBytes];  // with norms
  // Gradients of scores and of k k^T: [i][j], times scale and betas; per channel those across
  // blocks, else all with decays.
  alignas(1024) unsigned char dP[kChunk * kChunk * 2], dM[kChunk * kChunk * 2];
  float G[Tr::kPerChannel ? kChunk : 1][Tr::kPerChannel ? Tr::kPitch : 1];
  // The same inside of eight tokens: (dP, dM) of [i][i - j], zeros where no token is so far back.
  alignas(16) float2 inside[Tr::kPerChannel ? kChunk : 1][8];
  // Of sum_v S dS; per channel, when these are read, dt_bias's of eight tokens each.
  float last_parts[Tr::kParts][Tr::K];
  // Per channel: [block of 16 or 8 tokens][channel]; else [quarter of the channels][token].
  float end_parts[4][Tr::kPerChannel ? Tr::K : kChunk];  // of k d(kR) exp(G_last - G)
  static constexpr int kSumParts = Tr::kPerChannel ? kRuns : 4;
  float sum_parts[kSumParts][Tr::kPerChannel ? Tr::K : kChunk];  // of G, then dG; or of q dq + ..
  // Per channel: the gates' parameters.
  alignas(8) float gate_bias[Tr::kPerChannel ? Tr::K : 2];
  float gate_rate;
  // Else: sums of pairs; dG and, behind it, what belongs to later tokens.
  static constexpr int kPairs = Tr::kPerChannel ? 1 : kChunk;
  float pair_rows[4][kPairs], pair_columns[4][kPairs], head_dG[2 * kPairs];
  float norms[2][kChunk];  // 1 / |k|, 1 / |q|
  float A_parts[Tr::kWarps];
  // Numbers of tokens, of this head and of the next one: kBeta and those behind it (Row).
  static constexpr int kKinds = Tr::kPerChannel ? 2 : 4;
  alignas(16) float rows[2][kKinds][kChunk];
  float dbeta_parts[Tr::V / 64][kChunk];  // of 64 value columns each
  float total;
  // Where the CTA works: wanted in few places, kept out of the registers in between.
  TokenTile tile, next_tile;
  int64_t head, item, next_head, next_item;
  bool has_next;
  bool is_first, is_last;          // of the group's value heads
  bool is_loaded, is_next_loaded;  // are inputs under way?
  int turn;                        // which of `rows` are this head's
  // Bulk copies of a head's dz and e, of its states: a phase for each head.
  uint64_t full_inputs, full_states;

  __device__ const float* rows_of(Row kind) const { return rows[turn][kind - kBeta]; }
};

// A warp's part of 64 x K: 16 tokens and a quarter of the channels.
template <class Tr>
struct Part {
  int block, quarter, lane, row, column;  // row, column: of the lane's first element
  // Made anew in every stage: what follows from it would fill the registers in between.
  __device__ Part() : Part(thread_index()) {}
  __device__ explicit Part(int thread)
      : block(thread / 32 % 4),
        quarter(thread / 128),
        lane(thread % 32),
        row(16 * block + lane / 4),
        column(quarter * (Tr::K / 4) + lane % 4 * 2) {}
  __device__ int first_column() const { return quarter * (Tr::K / 4); }
  // The four warps that have the same channels.
  __device__ void sync_quarter() const { named_sync(1 + quarter, 128); }
  // Bytes from a tile's beginning to the lane's pair of accumulators n, of rows 8 half further: two
  // of them are one exclusive or apart, as a quarter begins at a multiple of its pieces.
  __device__ uint32_t pair(int n, int half) const {
    return (pair_place<64>(row, column) ^ static_cast<uint32_t>(n << 4)) +
           static_cast<uint32_t>(half * 1024);
  }
};
// Accumulators of it.
template <class Tr>
using Fragment = float[Tr::kTiles][4];

// A thread's two channels and run of eight tokens, of gates per channel.
template <class Tr>
struct GatePlace {
  int channel, run, first;  // first: of the tokens
  __device__ GatePlace()
      : channel(thread_index() % (Tr::K / 2) * 2),
        run(thread_index() / (Tr::K / 2)),
        first(run * kRun) {}
  // The threads there are, or half of them.
  __device__ bool is_there() const { return Tr::K / 2 * kRuns == Tr::kThreads || run < kRuns; }
};

template <class Tr>
__device__ void put_fragment(float (&to)[kChunk][Tr::kPitch], const Fragment<Tr>& x) {
  const Part<Tr> at;
#pragma unroll
  for (int n = 0; n < Tr::kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(&to[at.row + 8 * half][at.column + 8 * n]) = {x[n][2 * half],
                                                                               x[n][2 * half + 1]};
    }
  }
}

}  // namespace deltic::gpu::gradient
