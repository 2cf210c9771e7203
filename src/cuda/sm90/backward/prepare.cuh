// What all chunks need and none has to wait for: norms, decays, operands with decays per channel,
// the scores and the inverse. A CTA of four warps has a chunk of one value head; products and
// inverse are those of the kernel of scores.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/scores/kernel.cuh"
#include "cuda/sm90/backward/stage_rows.cuh"

namespace deltic::gpu::gradient {

inline constexpr int kPrepareThreads = scores::kThreads;
inline constexpr float kLog2e = scores::kLog2e;
__device__ inline float exp_of(float x) { return exp2_approx(x * kLog2e); }

struct PrepareShared {
  float k_norm[kChunk], q_norm[kChunk];  // 1 / |k|, 1 / |q|; 1 without norm
  float log_decay[kChunk];               // gates per head
  float2 halves[2][kChunk];              // lay_bounds
  float bounds[2];
};

// The place of G of a token and channel in the shared memory of scores.
template <int K>
__device__ inline float* gate_place(const Params& p, unsigned char* smem, int r, int d) {
  return reinterpret_cast<float*>(smem + p.scores.g_at + r * scores::row_bytes(K, 4)) + d;
}

// Norms of the rows in shared memory; a warp has every fourth.
template <class E, int K>
__device__ void lay_norms(const Params& p, const unsigned char* smem, PrepareShared& s) {
  if (!p.l2norm) {
    if (threadIdx.x < kChunk) s.k_norm[threadIdx.x] = s.q_norm[threadIdx.x] = 1;
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = warp; r < kChunk; r += 4) {
    float k[K / 32], q[K / 32], rk, rq;
    const unsigned char* at = smem + r * scores::row_bytes(K, 2);
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      k[i] = to_float(reinterpret_cast<const E*>(at)[lane + 32 * i]);
      q[i] = to_float(reinterpret_cast<const E*>(at + p.scores.q_at)[lane + 32 * i]);
    }
    reciprocal_norms(k, q, rk, rq);
    if (lane == 0) s.k_norm[r] = rk, s.q_norm[r] = rq;
  }
}

// Rows of q and k with their norms, rounded, in place of the raw ones; per channel the operands
// with decays, from what is not rounded yet.
template <class E, int K, bool kPerChannel>
__device__ void lay_operands(const Params& p, unsigned char* smem, const PrepareShared& s,
                             int64_t item) {
  constexpr int kPieces = K / 8;
  unsigned char* out[3] = {static_cast<unsigned char*>(p.work.kE) + item * (kChunk * K * 2),
                           static_cast<unsigned char*>(p.work.kR) + item * (kChunk * K * 2),
                           static_cast<unsigned char*>(p.work.qE) + item * (kChunk * K * 2)};
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kPieces; i += kPrepareThreads) {
    const int r = i / kPieces, c = i % kPieces * 8;
    unsigned char* at = smem + r * scores::row_bytes(K, 2) + c * 2;
    float k[8], q[8];
    unpack<E>(*reinterpret_cast<const uint4*>(at), k);
    unpack<E>(*reinterpret_cast<const uint4*>(at + p.scores.q_at), q);
#pragma unroll
    for (int e = 0; e < 8; ++e) k[e] *= s.k_norm[r], q[e] *= s.q_norm[r];
    if (p.l2norm) {
      *reinterpret_cast<uint4*>(at) = pack_operands<E>(k);
      *reinterpret_cast<uint4*>(at + p.scores.q_at) = pack_operands<E>(q);
    }
    if constexpr (kPerChannel) {
      float x[3][8], G[8], last[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        *reinterpret_cast<float4*>(G + e) =
            *reinterpret_cast<const float4*>(gate_place<K>(p, smem, r, c + e));
        *reinterpret_cast<float4*>(last + e) =
            *reinterpret_cast<const float4*>(gate_place<K>(p, smem, kChunk - 1, c + e));
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float E_ = exp_of(G[e]);
        x[0][e] = k[e] * E_;
        x[1][e] = k[e] * exp_of(last[e] - G[e]);
        x[2][e] = p.scale * q[e] * E_;
      }
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        *reinterpret_cast<uint4*>(out[n] + place<64>(r, c)) = pack_operands<E>(x[n]);
      }
    }
  }
}

// Numbers of the rows: beta and G for the results of scores, all of them for the other kernels;
// exp(G_last). Gates per head are summed up here, by the first warp. Barriers inside.
template <int K, bool kPerChannel>
__device__ void lay_rows(const Params& p, unsigned char* smem, PrepareShared& s,
                         const TokenTile& tile, int64_t head, int64_t item) {
  float *beta = reinterpret_cast<float*>(smem + p.scores.rows_at), *G = beta + kChunk;
  const int r = static_cast<int>(threadIdx.x);
  float raw_beta = 0, raw_gate = 0;
  if (r < kChunk) {
    raw_beta = raw_of(p.beta, tile, head, r);
    if constexpr (!kPerChannel) {
      raw_gate = raw_of(p.g, tile, head, r);
      s.log_decay[r] = head_decay(p, tile, head, raw_gate, r);
    }
    beta[r] = beta_of(p, tile, raw_beta, r);
  }
  __syncthreads();  // beta, log decays, norms
  if constexpr (!kPerChannel) {
    if (r < kChunk) G[r] = head_sum(s.log_decay, r);
    __syncthreads();  // G
  }
  float* rows = p.work.rows + item * (kRowKinds * kChunk);
  if (r < kChunk) {
    rows[kBeta * kChunk + r] = beta[r];
    rows[kInverse * kChunk + r] = 1 / beta[r];
    rows[kRawBeta * kChunk + r] = raw_beta;
    if constexpr (!kPerChannel) {
      const float E_ = exp_of(G[r]), last = G[kChunk - 1];
      rows[kStart * kChunk + r] = s.k_norm[r] * E_;
      rows[kEnd * kChunk + r] = s.k_norm[r] * exp_of(last - G[r]);
      rows[kQuery * kChunk + r] = p.scale * s.q_norm[r] * E_;
      rows[kSum * kChunk + r] = G[r];
      rows[kRawGate * kChunk + r] = raw_gate;
    }
  }
  if (r < K) {
    const float last = kPerChannel ? *gate_place<K>(p, smem, kChunk - 1, r) : G[kChunk - 1];
    p.work.last[item * K + r] = exp_of(last);
  }
}

// Of a chunk in segments: log2 of the most that its tokens leave of a state, or of its gradient, in
// two parts. A token leaves what its slowest channel does, as the delta step mixes them, times the
// most by which I - beta k k^T lengthens a vector. NaN or infinity: nothing is forgotten. Rows with
// norms and numbers of rows are visible; a barrier inside, and one must follow.
template <class E, int K, bool kPerChannel>
__device__ void lay_bounds(const Params& p, unsigned char* smem, PrepareShared& s) {
  const float* beta = reinterpret_cast<const float*>(smem + p.scores.rows_at);
  const int thread = thread_index(), r = thread % kChunk, first = thread / kChunk * (K / 2);
  float square = 0, most = -INFINITY;  // of half a row
  if (!p.l2norm) {
    const unsigned char* at = smem + r * scores::row_bytes(K, 2) + first * 2;
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      float k[8];
      unpack<E>(*reinterpret_cast<const uint4*>(at + 16 * i), k);
#pragma unroll
      for (int e = 0; e < 8; ++e) square += k[e] * k[e];
    }
  }
  if constexpr (kPerChannel) {
    const float* here = gate_place<K>(p, smem, r, first);
    const float* before = gate_place<K>(p, smem, max(r, 1) - 1, first);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < K / 2; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(here + i);
      float4 y = *reinterpret_cast<const float4*>(before + i);
      if (r == 0) y = {0, 0, 0, 0};
      const float g[4] = {x.x - y.x, x.y - y.y, x.z - y.z, x.w - y.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) most = fmaxf(most, g[e]), sum += g[e];
    }
    if (isnan(sum)) most = INFINITY;  // which fmaxf does not see
  }
  s.halves[thread / kChunk][r] = {square, most};
  __syncthreads();  // halves of rows
  if (thread >= kChunk) return;
  const float2 x = s.halves[0][r], y = s.halves[1][r];
  constexpr float kNormalized = 1.01f;  // rounded to 16 bits
  const float growth = fabsf(1 - beta[r] * (p.l2norm ? kNormalized : x.x + y.x));
  float bound = growth <= 1 ? 0.0f : log2f(growth);
  if constexpr (kPerChannel) bound += fmaxf(x.y, y.y) * kLog2e;
  bound = warp_sum(bound);
  if (thread % 32 == 0) s.bounds[thread / 32] = bound;
}

// A result as a tile of the workspace: what lies above the diagonal is zero, and without kDiagonal
// what lies on it.
template <class E, bool kDiagonal>
__device__ void store_result(const float* m, void* to) {
  auto* out = static_cast<unsigned char*>(to);
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * 8; i += kPrepareThreads) {
    const int r = i / 8, c = i % 8 * 8;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = c + e < r + kDiagonal ? m[r * scores::kPitch + c + e] : 0.0f;
    *reinterpret_cast<uint4*>(out + place<64>(r, c)) = pack_operands<E>(x);
  }
}

// Raw gates on their way to the places of G, at the beginning of a token's row: whole rows at a
// time, where single numbers are parts of lines.
template <class T, int K>
__device__ void copy_gates(const Params& p, unsigned char* smem, const TokenTile& tile,
                           int64_t head) {
  constexpr int kPiece = 16 / sizeof(T), kPieces = K / kPiece, kStep = kPrepareThreads / kPieces;
  const int row = thread_index() / kPieces, c = thread_index() % kPieces * kPiece;
  const T* from =
      static_cast<const T*>(p.g.data) + offset(p.g, tile.batch, tile.begin + row, head) + c;
  unsigned char* to =
      reinterpret_cast<unsigned char*>(gate_place<K>(p, smem, row, 0)) + sizeof(T) * c;
#pragma unroll
  for (int r = 0; r < kChunk; r += kStep, from += p.g.st * kStep) {
    copy_async_or_zero(to + r * scores::row_bytes(K, 4), from, row + r < tile.length);
  }
}
// G per channel: a thread has one. Copies are under way; raw gates of tiles are waited for. A
// barrier must follow.
template <int K>
__device__ void lay_channels(const Params& p, unsigned char* smem, const TokenTile& tile,
                             int64_t head) {
  const int d = thread_index();
  const bool has = d < K;
  float g[kChunk], before = 0;
  if (p.g_bytes > 0) {
    copies_wait<0>();
    __syncthreads();  // raw gates
    const unsigned char* raw =
        reinterpret_cast<unsigned char*>(gate_place<K>(p, smem, 0, 0)) + p.g_bytes * d;
    const auto place = [](int i) { return i * scores::row_bytes(K, 4); };
    if (has) {
      p.g_bytes == 2 ? raw_of_tile(p, raw, place, g) : raw_of_floats(raw, place, g);
    }
    __syncthreads();  // they have been read: G takes their place
  } else if (has) {
    ChannelGate::raw(p, tile, head, d, 0, g);
  }
  if (!has) return;
  const ChannelGate gate(p, head, d);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    before += gate.sums(p, tile, g + 16 * b, 16 * b, before, gate_place<K>(p, smem, 16 * b, d),
                        scores::row_bytes(K, 4) / 4);
  }
}

template <class E, int K, bool kPerChannel>
using ScoresTraits = scores::Traits<E, K, kPerChannel, true, true>;

template <class E, int K, bool kPerChannel>
__global__ void __launch_bounds__(kPrepareThreads, kPerChannel ? 3 : 4)
    prepare_kernel(const __grid_constant__ Params p) {
  using Tr = ScoresTraits<E, K, kPerChannel>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ PrepareShared s;
  __shared__ scores::Shared shared;
  begin_launch();
  if (is_wrong(p.tokens)) return;
  const int64_t item = blockIdx.x, head = blockIdx.x % p.HV;
  {
    const TokenTile tile = find_tile(p.tokens, blockIdx.x / p.HV);
    if (tile.length == 0) return;
    if (threadIdx.x == 0) shared = {tile, head};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      scores::load_half<E, scores::Past::zeros, K>(p.k, tile, key_head_of(p, head), half, smem);
      scores::load_half<E, scores::Past::zeros, K>(p.q, tile, key_head_of(p, head), half,
                                                   smem + p.scores.q_at);
    }
    if constexpr (kPerChannel) {
      if (p.g_bytes == 2) copy_gates<uint16_t, K>(p, smem, tile, head);
      if (p.g_bytes == 4) copy_gates<float, K>(p, smem, tile, head);
    }
    copies_commit();
    if constexpr (kPerChannel) lay_channels<K>(p, smem, tile, head);
    copies_wait<0>();
    __syncthreads();  // q, k, G per channel
    lay_norms<E, K>(p, smem, s);
    lay_rows<K, kPerChannel>(p, smem, s, tile, head, item);
    lay_operands<E, K, kPerChannel>(p, smem, s, item);
    __syncthreads();  // rows with norms
    if (p.segment > 0) {
      lay_bounds<E, K, kPerChannel>(p, smem, s);
      __syncthreads();  // bounds
      if (threadIdx.x == 0) {
        const float* G = reinterpret_cast<const float*>(smem + p.scores.rows_at) + kChunk;
        const bool has_sum = !kPerChannel && p.gate != Gate::none;
        p.work.bound[item] = s.bounds[0] + s.bounds[1] + (has_sum ? G[kChunk - 1] * kLog2e : 0.0f);
      }
    }
  }
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const scores::Products<Tr> products(p.scores, smem, lane);
  if constexpr (kPerChannel) {
    const int role = (warp + static_cast<int>(blockIdx.x)) % 4;
    if (role < 2) {
      scores::inside_role<Tr>(p.scores, products, smem, shared, role);
    } else if (role == 2) {
      scores::level_32_role<Tr>(p.scores, products, smem, shared);
    } else {
      scores::level_16_role<Tr>(p.scores, products, smem, shared);
    }
  } else {
    scores::plain_role<Tr>(p.scores, products, smem, shared, warp);
  }
  __syncthreads();  // L and the scores are complete
  const scores::Results results(p.scores, smem, shared);
  store_result<E, true>(results.scores, static_cast<E*>(p.work.P) + item * (kChunk * kChunk));
  invert<Triangles<64, scores::kPitch>>(results.kkt, warp, lane);
  store_result<E, false>(results.kkt, static_cast<E*>(p.work.T) + item * (kChunk * kChunk));
}

}  // namespace deltic::gpu::gradient
