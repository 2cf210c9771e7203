// A thread's part of the state in fp32 registers from the first token of a stage to the last: two
// pieces of kColumns columns, V-first. 16-bit states have the values that they are rounded to, so
// that a token costs no packing and no way to shared memory. Called by all threads of the CTA.
#pragma once

#include "cuda/sm80/decode/stage_state.cuh"

namespace deltic::gpu::decode {

// [column][channel], the channels of piece x and then those of piece x + kLanesK.
template <class Tr>
using Held = float[Tr::kColumns][Tr::kOwnPieces * kChannels];

template <class Tr>
__device__ void get_held(const Stage<Tr>& s, int tile, Held<Tr>& S) {
  constexpr int kN = kVectorSize<Tr>;
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i) {
    float x[kN];
    unpack<typename Tr::E>(s.state[tile][request_place<Tr>(i)], x);
#pragma unroll
    for (int e = 0; e < kN; ++e) S[i / kOwnVectors<Tr>][i % kOwnVectors<Tr> * kN + e] = x[e];
  }
}
// Vector i as it lies in memory.
template <class Tr>
__device__ uint4 held_vector(const Held<Tr>& S, int i) {
  constexpr int kN = kVectorSize<Tr>;
  float x[kN];
#pragma unroll
  for (int e = 0; e < kN; ++e) x[e] = S[i / kOwnVectors<Tr>][i % kOwnVectors<Tr> * kN + e];
  return pack<typename Tr::E>(x);
}
template <class Tr>
__device__ void put_held(const Held<Tr>& S, int tile, Stage<Tr>& s) {
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i)
    s.state[tile][request_place<Tr>(i)] = held_vector<Tr>(S, i);
}
template <class Tr>
__device__ void store_held(const Params& p, const Slice& at, const Part& part, int slot,
                           const Held<Tr>& S) {
  walk<Tr>(at, part, p.state_out, slot, [&](int i, auto* to, bool is_there) {
    if (is_there) store_vector(to, held_vector<Tr>(S, i));
  });
}

// To the values that a state of type E has. bf16: one instruction, whose lower half is a zero.
template <class E, int N>
__device__ void round_held(float (&x)[N]) {
  if constexpr (__is_same(E, __half)) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = __half22float2(__floats2half2_rn(x[i], x[i + 1]));
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  } else if constexpr (sizeof(E) == 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = __uint_as_float(pack_bf16(0.0f, x[i]));
  }
}

// Columns whose sums a lane ends with, and lanes with the same ones.
template <class Tr>
inline constexpr int kHeldLeft = Tr::kColumns > Tr::kLanesK / 2 ? Tr::kColumns / (Tr::kLanesK / 2)
                                                                : 1;
template <class Tr>
inline constexpr int kHeldStride =
    Tr::kColumns > Tr::kLanesK / 2 ? 1 : Tr::kLanesK / 2 / Tr::kColumns;
// The first of them, of the tile; and whether the lane is the one that leaves o.
template <class Tr>
__device__ int held_column(const Part& part) {
  return part.column + part.piece % (Tr::kLanesK / 2) / kHeldStride<Tr> * kHeldLeft<Tr>;
}
template <class Tr>
__device__ bool leaves_held(const Part& part) {
  return part.piece >= Tr::kLanesK / 2 && part.piece % kHeldStride<Tr> == 0;
}

// Where a thread finds a token's numbers: rows from its piece on. Lanes of the upper half take q
// for their own row and k for the other one.
template <class Tr>
struct HeldToken {
  const float *own, *other, *k, *decay;
  const float* v;  // of the column whose sums the thread ends with
  const float *beta, *kq;

  __device__ HeldToken(const Stage<Tr>& s, const Part& part, int t, int tile) {
    const bool has_q = part.piece >= Tr::kLanesK / 2;
    const float *q_row = s.q[t] + 4 * part.piece, *k_row = s.k[t] + 4 * part.piece;
    own = has_q ? q_row : k_row, other = has_q ? k_row : q_row, k = k_row;
    decay = s.decay[t] + (Tr::kPerChannel ? 4 * part.piece : 0);
    v = s.v[t] + tile * Tr::kSlice + held_column<Tr>(part);
    beta = &s.beta[t], kq = &s.kq[t];
  }
  __device__ void advance() {
    own += Tr::kWidth, other += Tr::kWidth, k += Tr::kWidth;
    decay += Tr::kPerChannel ? Tr::kWidth : 4, v += Tr::kSpan, ++beta, ++kq;
  }
};

// u and o_t of S_{t-1} as in step(), with its sums and roundings in its order: the pieces of a
// column are added up by halves, of which the first is the thread's own, then k's sums go to the
// lower half of the lanes and q's to the upper one, which needs no exchange of registers by the
// rows above. leave(j, o): of column held_column() + j, by lanes with q. Decays per channel: S' is
// left behind.
template <class Tr, class Leave>
__device__ void solve_held(const Part& part, const HeldToken<Tr>& token, Held<Tr>& S,
                           float (&u)[Tr::kColumns], Leave leave) {
  constexpr int kC = Tr::kColumns, kL = Tr::kLanesK, kHalf = kL / 2;
  constexpr int kLeft = kHeldLeft<Tr>, kStride = kHeldStride<Tr>;
  const float head_decay = Tr::kPerChannel ? 1.0f : *token.decay;
  float own[kC], other[kC];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x[kC] = {}, y[kC] = {};
#pragma unroll
    for (int first = 0; first < kChannels; first += 4) {
      float a[4], b[4], decay[4];
      read_run<Tr>(token.own, h * kL, first, a), read_run<Tr>(token.other, h * kL, first, b);
      if constexpr (Tr::kPerChannel) read_run<Tr>(token.decay, h * kL, first, decay);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int c = 0; c < kC; ++c) {
          float& z = S[c][h * kChannels + first + e];
          if constexpr (Tr::kPerChannel) z = __fmul_rn(z, decay[e]);
          x[c] = __fmaf_rn(z, a[e], x[c]), y[c] = __fmaf_rn(z, b[e], y[c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      own[c] = h == 0 ? x[c] : own[c] + x[c], other[c] = h == 0 ? y[c] : other[c] + y[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) own[c] += __shfl_xor_sync(0xFFFFFFFFu, other[c], kHalf);
  sum_halving<kHalf / 2, 1>(own, part.piece);
  const float beta = *token.beta, kq = *token.kq;
#pragma unroll
  for (int j = 0; j < kLeft; ++j) {
    const float sum = __fmul_rn(head_decay, own[j]);
    own[j] = __fmul_rn(beta, __fsub_rn(token.v[j], sum));  // of lanes with k
    const float other_u = __shfl_xor_sync(0xFFFFFFFFu, own[j], kHalf);
    leave(j, __fmaf_rn(kq, other_u, sum));
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    u[c] = __shfl_sync(0xFFFFFFFFu, own[c % kLeft], c / kLeft * kStride, kL);
  }
}
// S_t = S' + k u^T, rounded.
template <class Tr>
__device__ void update_held(const HeldToken<Tr>& token, const float (&u)[Tr::kColumns],
                            Held<Tr>& S) {
  constexpr int kC = Tr::kColumns, kL = Tr::kLanesK;
  const float head_decay = Tr::kPerChannel ? 1.0f : *token.decay;
#pragma unroll
  for (int first = 0; first < 2 * kChannels; first += 4) {
    float k[4];
    read_run<Tr>(token.k, first / kChannels * kL, first % kChannels, k);
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      float z[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        z[e] = S[c][first + e];
        if constexpr (!Tr::kPerChannel) z[e] = __fmul_rn(z[e], head_decay);
        z[e] = __fmaf_rn(k[e], u[c], z[e]);
      }
      round_held<typename Tr::E>(z);
#pragma unroll
      for (int e = 0; e < 4; ++e) S[c][first + e] = z[e];
    }
  }
}
// Both. o: of token t at column 0 of the tile; count: columns.
template <class Tr>
__device__ void step_held(const Params& p, const Part& part, int64_t o, int count,
                          const Stage<Tr>& s, int t, int tile, Held<Tr>& S) {
  float u[Tr::kColumns];
  const HeldToken<Tr> token(s, part, t, tile);
  const int column = held_column<Tr>(part);
  solve_held<Tr>(part, token, S, u, [&](int j, float x) {
    if (leaves_held<Tr>(part) && column + j < count) {
      store(p.o.data, p.o.dtype, o + column + j, x);
    }
  });
  update_held<Tr>(token, u, S);
}

// The tokens of a stage over one tile, which has arrived.
template <class Tr>
__device__ void run_held(const Params& p, const Part& part, Stage<Tr>& s, int first, int count,
                         int tile) {
  Held<Tr> S;
  get_held<Tr>(s, tile, S);
  int64_t o;
  int columns;
  {
    const auto [slice, place, to] = load_work(s.work);
    const Slice at = tile_of<Tr>(slice, tile);
    o = offset(p.o, place.batch, place.begin + first, at.head) + at.first, columns = at.count;
  }
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    step_held<Tr>(p, part, o, columns, s, t, tile, S);
    o += p.o.st;
    const auto [slice, place, to] = load_work(s.work);
    const int slot = p.slots.per_token               ? token_slot(p.slots, slice.n, first + t)
                     : first + t + 1 == place.length ? to
                                                     : -1;
    if (slot >= 0) store_held<Tr>(p, tile_of<Tr>(slice, tile), part, slot, S);
  }
  if (first + count < load_work(s.work).place.length) put_held<Tr>(S, tile, s);
}

}  // namespace deltic::gpu::decode
