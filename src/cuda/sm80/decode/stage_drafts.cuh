// Several drafted tokens at once, from a state that stays as it is. With S the state before them,
// F(s, t) the decays of the tokens behind s up to t on t's path, E_t those from the path's start,
// and s over the ancestors of t:
//
//   u_t = beta_t (v_t - E_t S^T k_t - sum_s (k_t, F(s, t) k_s) u_s)
//   o_t = E_t S^T q_t + sum_s (q_t, F(s, t) k_s) u_s + (q_t, k_t) u_t
//
// Decays are multiplied up token by token, so that every factor is one that decode has, too. What
// is no ancestor is left out: it never enters a sum.
#pragma once

#include "cuda/ptx/fragments.cuh"
#include "cuda/sm80/decode/stage_state.cuh"
#include "cuda/tile/updates.cuh"

namespace deltic::gpu::decode {

template <class Tr>
struct DraftStage {
  static constexpr int kT = Tr::kStageTokens;
  Stage<Tr> stage;           // its state: the tile, as tile_place says
  float2 pairs[kT][kT + 1];  // [t][s]: k_t and q_t with F(s, t) k_s; of s = t the latter alone
  float start[kT];           // E_t; per channel 1: it is in k and q
  int parent[kT];            // -1: where the sequence starts
  uint32_t path[kT];         // bit s: token s is an ancestor
};

// ---- The state -------------------------------------------------------------------------------

// Where the four numbers from a column (V-first: of neighbouring channels) or channel (K-first: of
// neighbouring columns) wait in shared memory. Moved about so that eight lanes of a fragment's load
// meet no bank twice: V-first they have two columns, K-first two runs of four channels.
template <class Tr>
__device__ constexpr int tile_place(int column, int channel) {
  return Tr::kVFirst ? column * (Tr::kWidth / 4) + (channel / 4 ^ (column / 2 & 1) * 4)
                     : channel * (Tr::kSlice / 4) + (column / 4 ^ (channel / 4 & 3) * 2);
}

// Whole rows of the slice, all under way when it returns; slot -1: zeros. By all threads.
template <class Tr>
__device__ void request_tile(const Params& p, const Slice& at, int slot, Stage<Tr>& s) {
  constexpr int kRow = (Tr::kVFirst ? Tr::kWidth : Tr::kSlice) / 4, kStep = Tr::kThreads / kRow;
  const States& x = p.state_in;
  const int thread = static_cast<int>(threadIdx.x), c = thread % kRow * 4;
  const int64_t stride = Tr::kVFirst ? x.s_v : x.s_k;
  int r = thread / kRow;
  const float* from = static_cast<const float*>(x.data) + max(slot, 0) * x.s_slot +
                      at.head * x.s_head + at.first * (Tr::kVFirst ? stride : 1) + r * stride + c;
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i) {
    const bool is_there = slot >= 0 && (Tr::kVFirst ? r : c) < at.count;
    copy_async(&s.state[0][Tr::kVFirst ? tile_place<Tr>(r, c) : tile_place<Tr>(c, r)], from,
               is_there);
    r += kStep, from += kStep * stride;
  }
}

// ---- Tokens among themselves -----------------------------------------------------------------

// A lane's channels of a row: kN neighbours.
template <class Tr>
inline constexpr int kLaneChannels = Tr::kWidth / 32;
template <class Tr>
__device__ void read_lane(const float* row, float (&x)[kLaneChannels<Tr>]) {
#pragma unroll
  for (int i = 0; i < kLaneChannels<Tr>; i += 2) {
    const float2 pair =
        *reinterpret_cast<const float2*>(row + kLaneChannels<Tr> * (threadIdx.x % 32) + i);
    x[i] = pair.x, x[i + 1] = pair.y;
  }
}
// A number as the sum of two bf16 numbers, to 2^-18; of two neighbours.
struct SplitPair {
  uint32_t high, low;
};
__device__ inline SplitPair split_bf16(float x, float y) {
  const uint32_t high = pack_bf16(x, y);
  return {high, pack_bf16(x - bf16_lo(high), y - bf16_hi(high))};
}
// A token's k and q, times E_t where that is one decay per channel.
template <class Tr>
struct DraftRows {
  float k[kLaneChannels<Tr>], q[kLaneChannels<Tr>];
};

// Over the rows of k and q: their high parts, and their low ones, each as a lane of the product has
// them, pairs of k and of q by turns: four words of eight rows are a left factor.
template <class Tr>
__device__ void write_split(float* high, float* low, const DraftRows<Tr>& row) {
  constexpr int kPairs = kLaneChannels<Tr> / 2;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const SplitPair k = split_bf16(row.k[2 * i], row.k[2 * i + 1]);
    const SplitPair q = split_bf16(row.q[2 * i], row.q[2 * i + 1]);
    const int at = kPairs * (static_cast<int>(threadIdx.x) % 32) + i;
    reinterpret_cast<uint2*>(high)[at] = {k.high, q.high};
    reinterpret_cast<uint2*>(low)[at] = {k.low, q.low};
  }
}

// From token t up to where its path starts, by a warp: products with its ancestors, four at a time,
// whose sums over the lanes go together.
template <class Tr>
__device__ void walk_path(int t, DraftStage<Tr>& d, DraftRows<Tr>& row) {
  constexpr int kN = kLaneChannels<Tr>, kGates = Tr::kPerChannel ? kN : 1, kStep = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  read_lane<Tr>(d.stage.k[t], row.k), read_lane<Tr>(d.stage.q[t], row.q);
  float decay[kGates];
#pragma unroll
  for (float& x : decay) x = 1.0f;
  uint32_t path = 0;
#pragma unroll 1
  for (int x = t; x >= 0;) {
    uint32_t ancestors = ~0u;  // a byte each
    float sums[2 * kStep] = {};
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      if (x < 0) continue;  // the same for all lanes
      float own[kGates];
      if constexpr (Tr::kPerChannel) {
        read_lane<Tr>(d.stage.decay[x], own);
      } else {
        own[0] = d.stage.decay[x][0];
      }
#pragma unroll
      for (int e = 0; e < kGates; ++e) decay[e] *= own[e];
      x = d.parent[x];
      if (x < 0) continue;
      path |= 1u << x, ancestors ^= (x ^ 0xFFu) << 8 * i;
      float k[kN];
      read_lane<Tr>(d.stage.k[x], k);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float decayed = decay[Tr::kPerChannel ? e : 0] * k[e];
        sums[2 * i] = fmaf(row.k[e], decayed, sums[2 * i]);
        sums[2 * i + 1] = fmaf(row.q[e], decayed, sums[2 * i + 1]);
      }
    }
    sum_halving<16, 1>(sums, lane);  // lanes 4 i to 4 i + 3 end with number i
    const auto s = static_cast<int8_t>(ancestors >> lane / 8 * 8);
    float2& pair = d.pairs[t][s < 0 ? 0 : s];
    if (lane % 4 == 0 && s >= 0) (lane / 4 % 2 == 0 ? pair.x : pair.y) = sums[0];
  }
  if constexpr (Tr::kPerChannel) {
#pragma unroll
    for (int e = 0; e < kN; ++e) {  // rounded, whatever kernel it is: never part of an fma
      row.k[e] = __fmul_rn(row.k[e], decay[e]), row.q[e] = __fmul_rn(row.q[e], decay[e]);
    }
  }
  if (lane == 0) {
    d.start[t] = Tr::kPerChannel ? 1.0f : decay[0];
    d.path[t] = path;
    d.pairs[t][t] = {0.0f, d.stage.kq[t]};
  }
}

// k and decays of a token into the record, by a warp.
template <class Tr>
__device__ void store_keys(const DraftParams& p, const Slice& at, int t, const Stage<Tr>& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* row = update_row(p, 0, at.n, t, at.head);
  float* decays = row + Tr::kWidth + p.V;
  for (int d = lane; d < Tr::kWidth; d += 32) {
    row[d] = s.k[t][d];
    if constexpr (Tr::kPerChannel) decays[d] = s.decay[t][d];
  }
  if (!Tr::kPerChannel && p.gate == Gate::head && lane == 0) decays[0] = s.decay[t][0];
}

// ---- Products with the state -----------------------------------------------------------------

// Runs of sixteen columns that a warp has.
template <class Tr>
inline constexpr int kDraftRuns = Tr::kSlice / 16 / Tr::kWarps;
// [eight tokens][run][tile]: S^T k of columns 2 n + tile in [0..1], S^T q in [2..3]. Lane x has
// token x / 4 and n = 2 (x % 4), and n + 1 beside it.
template <class Tr>
using DraftSums = float[Tr::kStageTokens / 8][kDraftRuns<Tr>][2][4];
// The first column of a warp's run.
template <class Tr>
__device__ int run_column(int run) {
  return (static_cast<int>(threadIdx.x) / 32 * kDraftRuns<Tr> + run) * 16;
}

// Sixteen channels of eight rows of k, and of q.
template <class Tr>
__device__ uint4 row_fragment(const float (&rows)[Tr::kStageTokens][Tr::kRowPitch], int first,
                              int block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return *reinterpret_cast<const uint4*>(&rows[first + lane / 4][16 * block + 4 * (lane % 4)]);
}
// The same channels of a run of columns: of columns 2 n, and of columns 2 n + 1.
template <class Tr>
__device__ void state_fragments(const Stage<Tr>& s, int run, int block, HalfFragment (&high)[2],
                                HalfFragment (&low)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = run_column<Tr>(run) + lane / 4 * 2, channel = 16 * block + 4 * (lane % 4);
  float x[2][4];
  if constexpr (Tr::kVFirst) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unpack<float>(s.state[0][tile_place<Tr>(column + j, channel)], x[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = reinterpret_cast<const float2*>(
          &s.state[0][tile_place<Tr>(column, channel + i)])[column / 2 % 2];
      x[0][i] = pair.x, x[1][i] = pair.y;
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitPair pair = split_bf16(x[j][2 * i], x[j][2 * i + 1]);
      high[j].x[i] = pair.high, low[j].x[i] = pair.low;
    }
  }
}

// A warp's columns of all tokens: of high and low parts three products, the small ones in sums of
// their own. The fourth, 2^-18 of the first, is left out.
template <class Tr>
__device__ void multiply_state(const Stage<Tr>& s, DraftSums<Tr>& sums) {
  using E = __nv_bfloat16;
  constexpr int kGroups = Tr::kStageTokens / 8, kRuns = kDraftRuns<Tr>;
  float small[kGroups][kRuns][2][4] = {};
#pragma unroll 2
  for (int block = 0; block < Tr::kWidth / 16; ++block) {
    uint4 row_high[kGroups], row_low[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      row_high[g] = row_fragment<Tr>(s.k, 8 * g, block);
      row_low[g] = row_fragment<Tr>(s.q, 8 * g, block);
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      HalfFragment high[2], low[2];
      state_fragments<Tr>(s, run, block, high, low);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const auto add = [&](float(&c)[4], const uint4& a, const HalfFragment& b) {
            mma_pairs<E>(c, a.x, a.y, a.z, a.w, b.x[0], b.x[1]);
          };
          add(small[g][run][j], row_low[g], high[j]);
          add(small[g][run][j], row_high[g], low[j]);
          add(sums[g][run][j], row_high[g], high[j]);
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[g][run][j][e] += small[g][run][j][e];
      }
    }
  }
}

// v of all tokens, where the state has been.
template <class Tr>
using DraftValues = float[Tr::kStageTokens][Tr::kSpan];
template <class Tr>
__device__ DraftValues<Tr>& values_of(Stage<Tr>& s) {
  static_assert(sizeof(DraftValues<Tr>) <= sizeof(s.state));
  return reinterpret_cast<DraftValues<Tr>&>(s.state);
}

// ---- u and o ---------------------------------------------------------------------------------

// Four neighbouring columns of a row, or the first `count` of them.
template <class E>
__device__ void store_columns(E* to, const float (&x)[4], int count, bool is_whole) {
  if (is_whole && count >= 4) {
    if constexpr (sizeof(E) == 4) {
      store_vector(to, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                   __float_as_uint(x[3]));
    } else {
      store_vector(to, pack_result<E>(x[0], x[1]), pack_result<E>(x[2], x[3]));
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < count) to[c] = from_float<E>(x[c]);
  }
}

// Token after token: four lanes have its u of the warp's columns, and hand them to the lanes of the
// tokens that come from it. A lane has four columns of a run of tokens x / 4, and x / 4 + 8.
template <class Tr>
__device__ void solve_drafts(const DraftParams& p, const Slice& at, const Place& place,
                             DraftStage<Tr>& d, const DraftSums<Tr>& sums) {
  constexpr int kT = Tr::kStageTokens, kGroups = kT / 8, kRuns = kDraftRuns<Tr>;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = lane / 4;
  const DraftValues<Tr>& values = values_of(d.stage);
  // v less what has been found of S'^T k, and o.
  float left[kGroups][kRuns][4], o[kGroups][kRuns][4], beta[kGroups];
  uint32_t path[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int t = own + 8 * g;
    beta[g] = d.stage.beta[t], path[g] = d.path[t];
    const float start = d.start[t];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const float4 four =
          *reinterpret_cast<const float4*>(&values[t][run_column<Tr>(run) + lane % 4 * 4]);
      const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        left[g][run][c] = fmaf(-start, sums[g][run][c % 2][c / 2], v[c]);
        o[g][run][c] = start * sums[g][run][c % 2][2 + c / 2];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kT; ++s) {
    if (s >= place.length) break;  // the same for all threads
    float u[kRuns][4];
#pragma unroll
    for (int i = 0; i < 4 * kRuns; ++i) {
      u[i / 4][i % 4] =
          __shfl_sync(0xFFFFFFFFu, beta[s / 8] * left[s / 8][i / 4][i % 4], s % 8 * 4 + lane % 4);
    }
#pragma unroll
    for (int g = s / 8; g < kGroups; ++g) {
      const bool is_ancestor = (path[g] >> s & 1) != 0;
      if (!is_ancestor && own + 8 * g != s) continue;
      const float2 pair = d.pairs[own + 8 * g][s];
#pragma unroll
      for (int i = 0; i < 4 * kRuns; ++i) {
        float& x = left[g][i / 4][i % 4];
        if (is_ancestor) x = fmaf(-pair.x, u[i / 4][i % 4], x);
        o[g][i / 4][i % 4] = fmaf(pair.y, u[i / 4][i % 4], o[g][i / 4][i % 4]);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int t = own + 8 * g;
    if (t >= place.length) continue;
    const int64_t row = offset(p.o, place.batch, place.begin + t, at.head) + at.first;
    float* update = p.updates.present && has_update(p, t)
                        ? update_row(p, 0, at.n, t, at.head) + Tr::kWidth + at.first
                        : nullptr;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int column = run_column<Tr>(run) + lane % 4 * 4, count = at.count - column;
      with_dtype(p.o.dtype, [&](auto* tag) {
        using E = std::remove_pointer_t<decltype(tag)>;
        store_columns<E>(static_cast<E*>(p.o.data) + row + column, o[g][run], count, p.o_whole);
      });
      if (update == nullptr) continue;
      float u[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) u[c] = beta[g] * left[g][run][c];
      store_columns<float>(update + column, u, count, p.u_whole);
    }
  }
}

}  // namespace deltic::gpu::decode
