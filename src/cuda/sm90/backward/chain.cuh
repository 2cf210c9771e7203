// The chain backward: the gradient of the state after every chunk, dz and dv of its tokens. With dS
// the gradient of the state after the chunk:
//
//     dy = P^T do + (k R) dS     dz = (I + T)^T dy     dv = beta dz
//     dS <- exp(G_last) dS + (q E)^T do - (k E)^T (beta dz)
#pragma once

#include "cuda/sm90/backward/stage_chain.cuh"

namespace deltic::gpu::gradient {

template <class Tr>
struct ChainStage {
  // k E, k R and q E, or the raw k and q.
  alignas(128) unsigned char keys[Tr::kPerChannel ? 3 : 2][Tr::kKeyBytes];
  unsigned char T[Tr::kSquareBytes], P[Tr::kSquareBytes];
  unsigned char values[Tr::kValueBytes];  // do, then dz, then dv
  unsigned char e[Tr::kValueBytes];
  float last[Tr::K], rows[kRowKinds * kChunk];

  __device__ uint32_t k_start() const { return smem_u32(keys[0]); }
  __device__ uint32_t k_end() const { return smem_u32(keys[Tr::kPerChannel ? 1 : 0]); }
  __device__ uint32_t query() const { return smem_u32(keys[Tr::kPerChannel ? 2 : 1]); }
};
template <class Tr>
struct ChainShared {
  ChainStage<Tr> stages[2];
  alignas(128) unsigned char staging[Tr::kWarps][16 * Tr::K];
};

template <class Tr>
__device__ void load_chain_stage(const Params& p, const ChainItem<Tr>& at, int c,
                                 ChainStage<Tr>& s) {
  const ChunkCopy<Tr> copy(p, at, c);
  const int64_t token = at.token(c);
  if constexpr (Tr::kPerChannel) {
    copy.image(s.keys[0], p.work.kE, Tr::kKeyBytes);
    copy.image(s.keys[1], p.work.kR, Tr::kKeyBytes);
    copy.image(s.keys[2], p.work.qE, Tr::kKeyBytes);
  } else {
    copy.keys(s.keys[0], p.k, token);
    copy.keys(s.keys[1], p.q, token);
  }
  copy.image(s.T, p.work.T, Tr::kSquareBytes);
  copy.image(s.P, p.work.P, Tr::kSquareBytes);
  copy.values(s.values, p.d_o, token);
  if (p.dbeta.present) {
    const char* e = static_cast<const char*>(p.work.e) + copy.item * (kChunk * Tr::V * 2);
    copy_bytes(s.e, e + at.slice * Tr::kValueBytes, Tr::kValueBytes, copy.thread, Tr::kThreads);
  }
  copy.numbers(s.last, s.rows);
}

// c += a m for a lower triangular tile m of [64][64].
template <class Tr>
__device__ void multiply_lower(uint32_t tile, const uint32_t (&a)[4][4], float (&c)[8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n <= k; ++n) {
      uint32_t b[4];
      load_right_turned<64>(tile, 16 * k, 16 * n, lane, b);
      multiply_pair<typename Tr::E>(&c[2 * n], a[k], b);
    }
  }
}

// x += dz e, summed over the lane's two columns: tokens 8 n + 2 (lane % 4) and the next at 2 n.
template <class Tr>
__device__ void multiply_values(const unsigned char* tile, const float (&dz)[8][4],
                                float (&x)[16]) {
  using E = typename Tr::E;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t e[4];
    load_left_turned<64>(smem_u32(tile), 16 * k, 16 * warp, lane, e);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 low = unpack<E>(e[2 * n]), high = unpack<E>(e[2 * n + 1]);
      const float(&z)[4] = dz[2 * k + n];
      x[4 * k + 2 * n] += z[0] * low.x + z[2] * high.x;
      x[4 * k + 2 * n + 1] += z[1] * low.y + z[3] * high.y;
    }
  }
}

// Sums of dz e over the warp's columns, to the workspace. dz is fp32 here: rounded like e it would
// double the error of dbeta. In a sequence's first chunk e is as well, as two operands: short
// sequences have no other tokens among which rounding would even out. Sixteen tokens' sums over
// eight lanes each, halved at every step: lane l is left with tokens 2 l and 2 l + 1.
template <class Tr>
__device__ void store_dbeta(const Params& p, const ChainItem<Tr>& at, int c, unsigned char* tile,
                            const float (&dz)[8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float x[16] = {};
  multiply_values<Tr>(tile, dz, x);
  if (c == 0) {
    const unsigned char* rest = static_cast<const unsigned char*>(p.work.e_rest) +
                                at.sequence_item(p) * (kChunk * Tr::V * 2) +
                                at.slice * Tr::kValueBytes;
    __syncwarp();  // e has been read
    for_pieces([&](int, int, uint32_t byte) {
      *reinterpret_cast<uint4*>(tile + byte) = *reinterpret_cast<const uint4*>(rest + byte);
    });
    __syncwarp();
    multiply_values<Tr>(tile, dz, x);
  }
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int m = 8 >> step;  // lanes 2 m apart
    const bool is_upper = (lane & 2 * m) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= m) break;
      const float kept = is_upper ? x[i + m] : x[i], sent = is_upper ? x[i] : x[i + m];
      x[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, 2 * m);
    }
  }
  float* to = p.work.dbeta + at.item(p, c) * (Tr::V / 16 * kChunk);
  const int part = at.slice * Tr::kWarps + warp;
  *reinterpret_cast<float2*>(to + part * kChunk + lane * 2) = {x[0], x[1]};
}

// One chunk by one warp.
template <class Tr>
__device__ void step_chain(const Params& p, const ChainItem<Tr>& at, int c, ChainStage<Tr>& s,
                           unsigned char* staging, State<Tr>& dS) {
  using E = typename Tr::E;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t item = at.item(p, c);
  float dy[8][4] = {};
  {
    uint32_t a[Tr::K / 16][4];
    to_operands<Tr>(at, dS, staging, static_cast<E*>(p.work.dS) + item * (Tr::V * Tr::K), a);
    multiply_keys<Tr>(s.k_end(), dS, c + 1 == at.num_chunks(), a, dy);
  }
  if constexpr (!Tr::kPerChannel) {
#pragma unroll
    for (int n = 0; n < 8; ++n) scale_columns(dy[n], factors_of(s.rows, kEnd, n, lane));
  }
  uint32_t d_o[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_left_turned<64>(smem_u32(s.values), 16 * k, 16 * warp, lane, d_o[k]);
  }
  multiply_lower<Tr>(smem_u32(s.P), d_o, dy);
  float(&dz)[8][4] = dy;
  {
    uint32_t a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) to_left<E>(&dy[2 * k], a[k]);
    multiply_lower<Tr>(smem_u32(s.T), a, dz);
  }
  __syncwarp();  // do has been read by all lanes
  put_values<Tr>(s.values, dz);
  send_values<Tr>(at, s.values, static_cast<E*>(p.work.dz) + item * (kChunk * Tr::V));
  if (p.dbeta.present) store_dbeta<Tr>(p, at, c, s.e, dz);
#pragma unroll
  for (int n = 0; n < 8; ++n) scale_columns(dz[n], factors_of(s.rows, kBeta, n, lane));
  if (p.dv.present) {
    put_values<Tr>(s.values, dz);
    E* out = static_cast<E*>(p.dv.data) + offset(p.dv, at.span.batch, at.token(c), at.head) +
             at.slice * Tr::kColumns;
    const int count = at.count(c);
    for_pieces([&](int row, int column, uint32_t byte) {
      if (row >= count) return;
      *reinterpret_cast<uint4*>(out + row * p.dv.st + column) =
          *reinterpret_cast<const uint4*>(s.values + byte);
    });
  }
  decay_state<Tr>(s.last, dS);
  uint32_t a[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; ++n) {
      if constexpr (Tr::kPerChannel) {
        scale_columns(dz[n], {-1.0f, -1.0f});
      } else {
        const float2 f = factors_of(s.rows, kStart, n, lane);
        scale_columns(dz[n], {-f.x, -f.y});
        const float2 q = factors_of(s.rows, kQuery, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t& x = d_o[k][n % 2 * 2 + half];
          const float2 y = unpack<E>(x);
          x = pack<E>(y.x * q.x, y.y * q.y);
        }
      }
    }
    to_left<E>(&dz[2 * k], a[k]);
  }
  add_outer<Tr>(s.k_start(), a, dS);
  add_outer<Tr>(s.query(), d_o, dS);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1) chain_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  static_assert(sizeof(ChainShared<Tr>) <= 232448, "shared memory of a CTA");
  auto& s = *reinterpret_cast<ChainShared<Tr>*>(smem);
  if (is_wrong(p.tokens)) return;
  const ChainItem<Tr> at(p);
  const int chunks = at.num_chunks();
  if (chunks > 0) load_chain_stage<Tr>(p, at, chunks - 1, s.stages[(chunks - 1) % 2]);
  float dS[Tr::K / 8][4];
  load_given<Tr>(at, p.d_final, dS);
  for (int c = chunks - 1; c >= 0; --c) {
    copies_wait<0>();
    __syncthreads();  // chunk c has arrived, and all are done with the one after it
    if (c > 0) load_chain_stage<Tr>(p, at, c - 1, s.stages[(c - 1) % 2]);
    step_chain<Tr>(p, at, c, s.stages[c % 2], s.staging[threadIdx.x / 32], dS);
  }
  store_given<Tr>(at, p.d_initial, dS);
}

}  // namespace deltic::gpu::gradient
