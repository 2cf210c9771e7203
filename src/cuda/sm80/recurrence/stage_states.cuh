// A thread's part of the state, S[i][e][c]: channel 32 i + 4 lane_k + e, column c of two. Loaded,
// stored in either layout, and stepped over one token. Called by a warp; no barriers but shuffles.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/recurrence/stage_tokens.cuh"

namespace deltic::gpu::recurrence {

template <int kBlocks>
using StateTile = float[kBlocks][4][kThreadColumns];

// N neighbouring elements at once: 4 to 16 bytes.
template <class E, int N>
struct alignas(sizeof(E) * N) Pack {
  E x[N];
};

// Lane in the warp: which channels and columns.
struct Lanes {
  int lane_k, column;  // column: the thread's first one within the CTA's slice
  int columns_left;    // columns of the slice from there on, <= 0: none
};

// A thread's elements in memory: from `data` on, channel 0 and its first column.
struct TileView {
  void* data;
  int64_t s_k, s_v;
  DType type;
  bool whole;
};

__device__ inline TileView view_of(const Slice& at, const Lanes& lanes, const States& x, bool whole,
                                   int64_t slot) {
  // Address arithmetic stays where it is used, here and in walk(): hoisted out of the loop over
  // tokens, the addresses of all elements would spill the registers.
  TileView view;
  view.s_k = opaque(x.s_k), view.s_v = opaque(x.s_v);
  view.type = x.dtype;
  view.whole = whole;
  const int64_t base = slot * x.s_slot + at.head * x.s_head + (at.first + lanes.column) * view.s_v;
  view.data = static_cast<char*>(x.data) + base * (view.type == DType::f32 ? 4 : 2);
  return view;
}

// Walks the tile in the layout's order, in runs of neighbours or by single elements:
// f(index in memory, i, e, c).
template <int kBlocks, bool kVFirst, bool kWhole, class F>
__device__ void walk(const TileView& view, int K, const Lanes& lanes, F&& f) {
  int64_t block = 4 * lanes.lane_k * view.s_k;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 4; e += kVFirst && kWhole ? 4 : 1) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; c += !kVFirst && kWhole ? kThreadColumns : 1) {
        if (32 * i + 4 * lanes.lane_k + e < K && c < lanes.columns_left) {
          f(block + e * view.s_k + c * view.s_v, i, e, c);
        }
      }
    }
    block = opaque(block + 32 * view.s_k);
  }
}

template <class E, bool kVFirst, bool kWhole, int kBlocks>
__device__ void load_tile(const TileView& view, int K, const Lanes& lanes, StateTile<kBlocks>& S) {
  walk<kBlocks, kVFirst, kWhole>(view, K, lanes, [&](int64_t at, int i, int e, int c) {
    constexpr int N = kWhole ? (kVFirst ? 4 : kThreadColumns) : 1;
    const auto pack = *reinterpret_cast<const Pack<E, N>*>(static_cast<const E*>(view.data) + at);
#pragma unroll
    for (int m = 0; m < N; ++m) {
      S[i][kVFirst ? e + m : e][kVFirst ? c : c + m] = to_float(pack.x[m]);
    }
  });
}

template <class E, bool kVFirst, bool kWhole, int kBlocks>
__device__ void store_tile(const TileView& view, int K, const Lanes& lanes,
                           const StateTile<kBlocks>& S) {
  walk<kBlocks, kVFirst, kWhole>(view, K, lanes, [&](int64_t at, int i, int e, int c) {
    constexpr int N = kWhole ? (kVFirst ? 4 : kThreadColumns) : 1;
    Pack<E, N> pack;
#pragma unroll
    for (int m = 0; m < N; ++m) {
      pack.x[m] = from_float<E>(S[i][kVFirst ? e + m : e][kVFirst ? c : c + m]);
    }
    *reinterpret_cast<Pack<E, N>*>(static_cast<E*>(view.data) + at) = pack;
  });
}

// Calls f.operator()<E, v_first, whole>() with what the view is like. kAllWhole: it is whole.
template <bool kAllWhole, class F>
__device__ void with_layout(const TileView& view, bool v_first, F&& f) {
  const auto typed = [&]<class E>() {
    if constexpr (kAllWhole) {
      v_first ? f.template operator()<E, true, true>() : f.template operator()<E, false, true>();
    } else if (v_first) {
      view.whole ? f.template operator()<E, true, true>() : f.template operator()<E, true, false>();
    } else {
      view.whole ? f.template operator()<E, false, true>()
                 : f.template operator()<E, false, false>();
    }
  };
  with_dtype(view.type,
             [&](auto* tag) { typed.template operator()<std::remove_pointer_t<decltype(tag)>>(); });
}

// slot -1: zeros.
template <class Tr>
__device__ void load_state(const Params& p, const Slice& at, const States& x, bool whole,
                           int64_t slot, const Lanes& lanes, StateTile<Tr::kBlocks>& S) {
#pragma unroll
  for (int i = 0; i < Tr::kBlocks * 4 * kThreadColumns; ++i) (&S[0][0][0])[i] = 0;
  if (slot < 0) return;
  const TileView view = view_of(at, lanes, x, whole, slot);
  with_layout<Tr::kOneStage>(view, p.v_first, [&]<class E, bool kVFirst, bool kWhole>() {
    load_tile<E, kVFirst, kWhole, Tr::kBlocks>(view, p.K, lanes, S);
  });
}

template <class Tr>
__device__ void load_initial(const Params& p, const Slice& at, int64_t slot, const Lanes& lanes,
                             StateTile<Tr::kBlocks>& S) {
  load_state<Tr>(p, at, p.state_in, p.in_whole, slot, lanes, S);
}
// A tree's other branch: the state that token t starts from, where it is not the one that the token
// before it left. A thread reads what it has written itself: nothing needs to be ordered.
template <class Tr>
__device__ void load_branch(const Params& p, const Slice& at, int64_t t, const Lanes& lanes,
                            StateTile<Tr::kBlocks>& S) {
  const int64_t parent = parent_of(p.slots, at.n, t);
  if (parent == t - 1) return;
  const auto from = jump_source(p.slots, at.n, parent);
  load_state<Tr>(p, at, from.is_start ? p.state_in : p.state_out,
                 from.is_start ? p.in_whole : p.out_whole, from.slot, lanes, S);
}

template <class Tr>
__device__ void store_state(const Params& p, const Lanes& lanes, const TileView& view,
                            const StateTile<Tr::kBlocks>& S) {
  with_layout<Tr::kOneStage>(view, p.v_first, [&]<class E, bool kVFirst, bool kWhole>() {
    store_tile<E, kVFirst, kWhole, Tr::kBlocks>(view, p.K, lanes, S);
  });
}

template <class E, int kBlocks>
__device__ void round_state_to(StateTile<kBlocks>& S) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4 * kThreadColumns; ++i) {
    float& x = (&S[0][0][0])[i];
    x = to_float(from_float<E>(x));
  }
}
template <int kBlocks>
__device__ void round_state(DType type, StateTile<kBlocks>& S) {
  type == DType::bf16 ? round_state_to<__nv_bfloat16>(S) : round_state_to<__half>(S);
}
// By chance, the state after token t: number by number.
template <int kBlocks>
__device__ void round_state_by_chance(const Params& p, const Slice& at, int64_t t,
                                      const Lanes& lanes, StateTile<kBlocks>& S) {
  const int64_t position = position_of(p.chance, p.slots, at.n, t);
#pragma unroll
  for (int i = 0; i < kBlocks * 4 * kThreadColumns; ++i) {
    const int64_t d = 32 * (i / (4 * kThreadColumns)) + 4 * lanes.lane_k + i / kThreadColumns % 4;
    const int64_t v = at.first + lanes.column + i % kThreadColumns;
    const int64_t element = p.v_first ? v * p.K + d : d * p.V + v;
    const Random128 draw =
        draw_slowly(p.chance.seed, position, at.head, static_cast<uint32_t>(element >> 3));
    const auto half = static_cast<uint32_t>(element) % 8;
    const uint32_t low = half < 2 ? draw.word[0] : half < 4 ? draw.word[1] : draw.word[2];
    const uint32_t random = ((half < 6 ? low : draw.word[3]) >> 16 * (half % 2)) & 0xFFFFu;
    float& x = (&S[0][0][0])[i];
    x = p.rounded_to == DType::bf16 ? bf16_to_f32(stochastic_bf16(x, random))
                                    : __half2float(__ushort_as_half(stochastic_f16(x, random)));
  }
}

// decay S + k u, with the roundings that the compiler chose for `step`, said here, so that whoever
// applies an update again has the same bits. A decay per head is in S before.
template <bool kPerChannel>
__device__ float updated(float S, float decay, float k, float u) {
  return kPerChannel ? __fmaf_rn(decay, S, __fmul_rn(k, u)) : __fmaf_rn(k, u, __fmul_rn(S, decay));
}

// S_{t-1} -> S_t and o_t; u_t of the thread's columns. Both products with S' are reduced together:
// o = S'^T q + u (k, q), so the chain of states has one reduction per token, not two. Decays per
// channel are in k and q there, and reach the state with k u^T: three vectors at a time would be
// more than the registers hold.
template <class Tr>
__device__ float2 step(Stage<Tr>& s, int token, const Lanes& lanes, bool has_value_decay,
                       StateTile<Tr::kBlocks>& S) {
  constexpr int kC = kThreadColumns;
  const float4* k4 = reinterpret_cast<const float4*>(s.k[token]);
  const float4* q4 = reinterpret_cast<const float4*>(s.q[token]);
  const float4* kd4 = Tr::kPerChannel ? reinterpret_cast<const float4*>(s.kd[token]) : k4;
  float rk[kC] = {}, rq[kC] = {};
  if (has_value_decay) {
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      const float decay = s.value_decay[token][lanes.column + c];
#pragma unroll
      for (int i = 0; i < Tr::kBlocks * 4; ++i) S[i / 4][i % 4][c] *= decay;
    }
  }
#pragma unroll
  for (int i = 0; i < Tr::kBlocks; ++i) {
    const float4 k = kd4[8 * i + lanes.lane_k], q = q4[8 * i + lanes.lane_k];
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      if constexpr (!Tr::kPerChannel) {
        const float decay = s.decay[token][0];
        S[i][0][c] *= decay, S[i][1][c] *= decay, S[i][2][c] *= decay, S[i][3][c] *= decay;
      }
      rk[c] += S[i][0][c] * k.x + S[i][1][c] * k.y + S[i][2][c] * k.z + S[i][3][c] * k.w;
      rq[c] += S[i][0][c] * q.x + S[i][1][c] * q.y + S[i][2][c] * q.z + S[i][3][c] * q.w;
    }
  }
  // Four sums over the eight lanes along K, each lane ends with one: bit 4 of lane_k says q or k,
  // bit 2 the column.
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const bool has_q = (lanes.lane_k & 4) != 0, has_second = (lanes.lane_k & 2) != 0;
  const float x0 = (has_q ? rq[0] : rk[0]) + __shfl_xor_sync(kAll, has_q ? rk[0] : rq[0], 4);
  const float x1 = (has_q ? rq[1] : rk[1]) + __shfl_xor_sync(kAll, has_q ? rk[1] : rq[1], 4);
  float x = (has_second ? x1 : x0) + __shfl_xor_sync(kAll, has_second ? x0 : x1, 2);
  x += __shfl_xor_sync(kAll, x, 1);
  const float2 v = *reinterpret_cast<const float2*>(&s.v[token][lanes.column]);
  const float2 beta = *reinterpret_cast<const float2*>(&s.beta[token][lanes.column]);
  const float u[kC] = {beta.x * (v.x - __shfl_sync(kAll, x, 0, kLanesK)),
                       beta.y * (v.y - __shfl_sync(kAll, x, 2, kLanesK))};
  if (has_q && (lanes.lane_k & 1) == 0) {
    s.o[token][lanes.column + (has_second ? 1 : 0)] = x + (has_second ? u[1] : u[0]) * s.kq[token];
  }
#pragma unroll
  for (int i = 0; i < Tr::kBlocks; ++i) {
    const float4 k = k4[8 * i + lanes.lane_k];
    if constexpr (Tr::kPerChannel) {
      const float4 d = reinterpret_cast<const float4*>(s.decay[token])[8 * i + lanes.lane_k];
#pragma unroll
      for (int c = 0; c < kC; ++c) {
        S[i][0][c] = updated<true>(S[i][0][c], d.x, k.x, u[c]);
        S[i][1][c] = updated<true>(S[i][1][c], d.y, k.y, u[c]);
        S[i][2][c] = updated<true>(S[i][2][c], d.z, k.z, u[c]);
        S[i][3][c] = updated<true>(S[i][3][c], d.w, k.w, u[c]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kC; ++c) {
        S[i][0][c] = __fmaf_rn(k.x, u[c], S[i][0][c]),
        S[i][1][c] = __fmaf_rn(k.y, u[c], S[i][1][c]);
        S[i][2][c] = __fmaf_rn(k.z, u[c], S[i][2][c]),
        S[i][3][c] = __fmaf_rn(k.w, u[c], S[i][3][c]);
      }
    }
  }
  return {u[0], u[1]};
}

}  // namespace deltic::gpu::recurrence
