// What all chunks need and none has to wait for: norms, decays, the scores and the inverse, of
// gates per head or none; per channel: prepare_channels.cuh. A CTA of four warps has a chunk of one
// value head; products and inverse are those of the kernel of scores.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/scores/kernel.cuh"
#include "cuda/sm90/backward/stage_rows.cuh"

namespace deltic::gpu::gradient {

inline constexpr int kPrepareThreads = scores::kThreads;
__device__ inline float exp_of(float x) { return exp2_approx(x * kLog2e); }

struct PrepareShared {
  float k_norm[kChunk], q_norm[kChunk];  // 1 / |k|, 1 / |q|; 1 without norm
  float log_decay[kChunk];
  float halves[2][kChunk];  // lay_bounds
  float bounds[2];
};

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

// Rows of q and k with their norms, rounded, in place of the raw ones.
template <class E, int K>
__device__ void normalize_rows(const Params& p, unsigned char* smem, const PrepareShared& s) {
  constexpr int kPieces = K / 8;
  if (!p.l2norm) return;
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kPieces; i += kPrepareThreads) {
    const int r = i / kPieces, c = i % kPieces * 8;
    unsigned char* at = smem + r * scores::row_bytes(K, 2) + c * 2;
    float k[8], q[8];
    unpack<E>(*reinterpret_cast<const uint4*>(at), k);
    unpack<E>(*reinterpret_cast<const uint4*>(at + p.scores.q_at), q);
#pragma unroll
    for (int e = 0; e < 8; ++e) k[e] *= s.k_norm[r], q[e] *= s.q_norm[r];
    *reinterpret_cast<uint4*>(at) = pack_operands<E>(k);
    *reinterpret_cast<uint4*>(at + p.scores.q_at) = pack_operands<E>(q);
  }
}

// Numbers of the rows: beta and G for the results of scores, all of them for the other kernels;
// exp(G_last). Gates are summed up here, by the first warps. Barriers inside.
template <int K>
__device__ void lay_rows(const Params& p, unsigned char* smem, PrepareShared& s,
                         const TokenTile& tile, int64_t head, int64_t item) {
  float *beta = reinterpret_cast<float*>(smem + p.scores.rows_at), *G = beta + kChunk;
  const int r = static_cast<int>(threadIdx.x);
  float raw_beta = 0, raw_gate = 0;
  if (r < kChunk) {
    raw_beta = raw_of(p.beta, tile, head, r);
    raw_gate = raw_of(p.g, tile, head, r);
    s.log_decay[r] = head_decay(p, tile, head, raw_gate, r);
    beta[r] = beta_of(p, tile, raw_beta, r);
  }
  __syncthreads();  // beta, log decays, norms
  if (r < kChunk) G[r] = head_sum(s.log_decay, r);
  __syncthreads();  // G
  float* rows = p.work.rows + item * (kRowKinds * kChunk);
  const float last = G[kChunk - 1];
  if (r < kChunk) {
    const float E_ = exp_of(G[r]);
    rows[kBeta * kChunk + r] = beta[r];
    rows[kInverse * kChunk + r] = 1 / beta[r];
    rows[kRawBeta * kChunk + r] = raw_beta;
    rows[kStart * kChunk + r] = s.k_norm[r] * E_;
    rows[kEnd * kChunk + r] = s.k_norm[r] * exp_of(last - G[r]);
    rows[kQuery * kChunk + r] = p.scale * s.q_norm[r] * E_;
    rows[kSum * kChunk + r] = G[r];
    rows[kRawGate * kChunk + r] = raw_gate;
  }
  if (r < K) p.work.last[item * K + r] = exp_of(last);
}

// Of a chunk in segments: log2 of the most that its tokens leave of a state, or of its gradient. A
// token leaves what its slowest channel does, as the delta step mixes them, times the most by which
// I - beta k k^T lengthens a vector, of which this is the second. NaN or infinity: nothing is
// forgotten. square: |k|^2 without norm.
__device__ inline float bound_of_token(const Params& p, float beta, float square) {
  constexpr float kNormalized = 1.01f;  // rounded to 16 bits
  const float growth = fabsf(1 - beta * (p.l2norm ? kNormalized : square));
  return growth <= 1 ? 0.0f : log2f(growth);
}
// In two parts, without the decay. Rows with norms and numbers of rows are visible; a barrier
// inside, and one must follow.
template <class E, int K>
__device__ void lay_bounds(const Params& p, unsigned char* smem, PrepareShared& s) {
  const float* beta = reinterpret_cast<const float*>(smem + p.scores.rows_at);
  const int thread = thread_index(), r = thread % kChunk, first = thread / kChunk * (K / 2);
  float square = 0;  // of half a row
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
  s.halves[thread / kChunk][r] = square;
  __syncthreads();  // halves of rows
  if (thread >= kChunk) return;
  const float bound = warp_sum(bound_of_token(p, beta[r], s.halves[0][r] + s.halves[1][r]));
  if (thread % 32 == 0) s.bounds[thread / 32] = bound;
}

// A result as a tile of the workspace: what lies above the diagonal is zero, and without kDiagonal
// what lies on it.
template <class E, bool kDiagonal, int kThreads = kPrepareThreads>
__device__ void store_result(const float* m, void* to) {
  auto* out = static_cast<unsigned char*>(to);
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * 8; i += kThreads) {
    const int r = i / 8, c = i % 8 * 8;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = c + e < r + kDiagonal ? m[r * scores::kPitch + c + e] : 0.0f;
    *reinterpret_cast<uint4*>(out + place<64>(r, c)) = pack_operands<E>(x);
  }
}

template <class E, int K>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    prepare_kernel(const __grid_constant__ Params p) {
  using Tr = scores::Traits<E, K, false, true, true>;
  extern __shared__ __align__(1024) unsigned char smem[];
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
    copies_commit();
    copies_wait<0>();
    __syncthreads();  // q, k
    lay_norms<E, K>(p, smem, s);
    lay_rows<K>(p, smem, s, tile, head, item);
    normalize_rows<E, K>(p, smem, s);
    __syncthreads();  // rows with norms
    if (p.segment > 0) {
      lay_bounds<E, K>(p, smem, s);
      __syncthreads();  // bounds
      if (threadIdx.x == 0) {
        const float* G = reinterpret_cast<const float*>(smem + p.scores.rows_at) + kChunk;
        const float sum = p.gate != Gate::none ? G[kChunk - 1] * kLog2e : 0.0f;
        p.work.bound[item] = s.bounds[0] + s.bounds[1] + sum;
      }
    }
  }
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const scores::Products<Tr> products(p.scores, smem, lane);
  scores::plain_role<Tr>(p.scores, products, smem, shared, warp);
  __syncthreads();  // L and the scores are complete
  const scores::Results results(p.scores, smem, shared);
  store_result<E, true>(results.scores, static_cast<E*>(p.work.P) + item * (kChunk * kChunk));
  invert<Triangles<64, scores::kPitch>>(results.kkt, warp, lane);
  store_result<E, false>(results.kkt, static_cast<E*>(p.work.T) + item * (kChunk * kChunk));
}

}  // namespace deltic::gpu::gradient
