// The chain forward: the state before every chunk, and e = v - S'^T k of its tokens.
//
//     x = v - (k E) S      y = (I + T) beta x      e = y / beta      S <- exp(G_last) S + (k R)^T y
#pragma once

#include "cuda/sm90/backward/stage_chain.cuh"

namespace deltic::gpu::gradient {

// Two of them: one is read while the other arrives.
template <class Tr>
struct StatesStage {
  // k E and k R, or the raw k.
  alignas(128) unsigned char keys[Tr::kPerChannel ? 2 : 1][Tr::kKeyBytes];
  unsigned char T[Tr::kSquareBytes];
  unsigned char values[Tr::kValueBytes];  // v, then e
  float last[Tr::K], rows[kRowKinds * kChunk];
};
template <class Tr>
struct StatesShared {
  StatesStage<Tr> stages[2];
  alignas(128) unsigned char staging[Tr::kWarps][16 * Tr::K];
};

template <class Tr>
__device__ void load_states_stage(const Params& p, const ChainItem<Tr>& at, int c,
                                  StatesStage<Tr>& s) {
  const ChunkCopy<Tr> copy(p, at, c);
  if constexpr (Tr::kPerChannel) {
    copy.image(s.keys[0], p.work.kE, Tr::kKeyBytes);
    copy.image(s.keys[1], p.work.kR, Tr::kKeyBytes);
  } else {
    copy.keys(s.keys[0], p.k, at.token(c));
  }
  copy.image(s.T, p.work.T, Tr::kSquareBytes);
  copy.values(s.values, p.v, at.token(c));
  copy.numbers(s.last, s.rows);
}

// One chunk by one warp.
template <class Tr>
__device__ void step_states(const Params& p, const ChainItem<Tr>& at, int c, StatesStage<Tr>& s,
                            unsigned char* staging, State<Tr>& S) {
  using E = typename Tr::E;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t item = at.item(p, c);
  float x[8][4] = {};
  {
    uint32_t a[Tr::K / 16][4];
    to_operands<Tr>(at, S, staging, static_cast<E*>(p.work.S) + item * (Tr::V * Tr::K), a);
    multiply_keys<Tr>(smem_u32(s.keys[0]), S, c == 0, a, x);
  }
  uint32_t ax[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t v[4];
    load_left_turned<64>(smem_u32(s.values), 16 * i, 16 * warp, lane, v);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float(&y)[4] = x[2 * i + n];
      if constexpr (!Tr::kPerChannel) scale_columns(y, factors_of(s.rows, kStart, 2 * i + n, lane));
      const float2 low = unpack<E>(v[2 * n]), high = unpack<E>(v[2 * n + 1]);
      y[0] = low.x - y[0], y[1] = low.y - y[1], y[2] = high.x - y[2], y[3] = high.y - y[3];
      scale_columns(y, factors_of(s.rows, kBeta, 2 * i + n, lane));
    }
    to_left<E>(&x[2 * i], ax[i]);
  }
  float(&y)[8][4] = x;
#pragma unroll
  for (int n = 3; n >= 0; --n) {
#pragma unroll
    for (int k = 0; k <= n; ++k) {
      uint32_t b[4];
      load_right<64>(smem_u32(s.T), 16 * n, 16 * k, lane, b);
      multiply_pair<E>(&y[2 * n], ax[k], b);
    }
  }
  // The operand of y, then e in its place.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float operand[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) operand[n][j] = y[2 * i + n][j];
      if constexpr (!Tr::kPerChannel) {
        scale_columns(operand[n], factors_of(s.rows, kEnd, 2 * i + n, lane));
      }
      scale_columns(y[2 * i + n], factors_of(s.rows, kInverse, 2 * i + n, lane));
    }
    to_left<E>(operand, ax[i]);
  }
  put_values<Tr>(s.values, y);
  send_values<Tr>(at, s.values, static_cast<E*>(p.work.e) + item * (kChunk * Tr::V));
  if (c == 0 && p.dbeta.present) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 rounded = unpack<E>(pack<E>(y[n][i], y[n][i + 1]));
        y[n][i] -= rounded.x, y[n][i + 1] -= rounded.y;
      }
    }
    put_values<Tr>(s.values, y);
    send_values<Tr>(at, s.values,
                    static_cast<E*>(p.work.e_rest) + at.sequence_item(p) * (kChunk * Tr::V));
  }
  decay_state<Tr>(s.last, S);
  add_outer<Tr>(smem_u32(s.keys[Tr::kPerChannel ? 1 : 0]), ax, S);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1) states_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  auto& s = *reinterpret_cast<StatesShared<Tr>*>(smem);
  if (is_wrong(p.tokens)) return;
  const ChainItem<Tr> at(p);
  const int chunks = at.num_chunks();
  if (chunks == 0) return;
  load_states_stage<Tr>(p, at, 0, s.stages[0]);
  float S[Tr::K / 8][4];
  load_given<Tr>(at, p.initial, S);
  for (int c = 0; c < chunks; ++c) {
    copies_wait<0>();
    __syncthreads();  // chunk c has arrived, and all are done with the one before
    if (c + 1 < chunks) load_states_stage<Tr>(p, at, c + 1, s.stages[(c + 1) % 2]);
    step_states<Tr>(p, at, c, s.stages[c % 2], s.staging[threadIdx.x / 32], S);
  }
}

}  // namespace deltic::gpu::gradient
