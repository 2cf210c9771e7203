// What all chunks need and none has to wait for: norms, decays, the scores and the inverse, of
// gates per head or none; per channel: prepare_channels.cuh. A CTA of four warps has a chunk of a
// q/k head and goes over its value heads, or over a part of them where chunks are few: rows, norms
// and products are theirs together. Products and inverse are those of the kernel of scores.
#pragma once

#include "cuda/ptx/numbers.cuh"
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
// Its |k|^2, in two halves; rows as the call has them. A barrier must follow.
template <class E, int K>
__device__ void lay_squares(const unsigned char* smem, PrepareShared& s) {
  const int thread = thread_index(), r = thread % kChunk, first = thread / kChunk * (K / 2);
  const unsigned char* at = smem + r * scores::row_bytes(K, 2) + first * 2;
  float square = 0;
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    float k[8];
    unpack<E>(*reinterpret_cast<const uint4*>(at + 16 * i), k);
#pragma unroll
    for (int e = 0; e < 8; ++e) square += k[e] * k[e];
  }
  s.halves[thread / kChunk][r] = square;
}
// The bound of a head's chunk, without the decay, in two parts: by two warps. Numbers of rows are
// visible; a barrier must follow.
__device__ inline void lay_bounds(const Params& p, const float* beta, PrepareShared& s) {
  const int r = thread_index();
  const float bound = warp_sum(bound_of_token(p, beta[r], s.halves[0][r] + s.halves[1][r]));
  if (r % 32 == 0) s.bounds[r / 32] = bound;
}

// An inverse as a tile of the workspace: what lies on the diagonal and above it is zero.
template <class E, int kThreads = kPrepareThreads>
__device__ void store_result(const float* m, void* to) {
  auto* out = static_cast<unsigned char*>(to);
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * 8; i += kThreads) {
    const int r = i / 8, c = i % 8 * 8;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = c + e < r ? m[r * scores::kPitch + c + e] : 0.0f;
    *reinterpret_cast<uint4*>(out + place<64>(r, c)) = pack_operands<E>(x);
  }
}

// What a CTA has in shared memory behind rows of q and k, and numbers of rows: beta k k^T of a head
// with decays, then its inverse. Products without them take the place of q and k.
__device__ inline float* matrix_of(const Params& p, unsigned char* smem) {
  return reinterpret_cast<float*>(smem + p.scores.smem_bytes - kMatrixBytes);
}

// Products as they are, in place of the rows: k k^T, and q k^T behind it.
template <class E, int K>
__device__ void lay_products(const Params& p, unsigned char* smem) {
  using Tr = scores::Traits<E, K, false, true, true>;
  constexpr int kColumns = scores::kPlainColumns;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  float ck[kColumns][4] = {}, cq[kColumns][4] = {};
  scores::plain_products<Tr>(p.scores, scores::Products<Tr>(p.scores, smem, lane), warp, ck, cq);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half == 0 ? warp : 7 - warp;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j > row) continue;
      auto* to = reinterpret_cast<float2*>(
          smem + ((8 * row + lane / 4) * scores::kPitch + 8 * j + lane % 4 * 2) * 4);
      to[0] = {ck[j][2 * half], ck[j][2 * half + 1]};
      to[kMatrixBytes / 8] = {cq[j][2 * half], cq[j][2 * half + 1]};
    }
  }
}

// From them the scores of a head, out as a tile of the workspace, and beta k k^T, both with decays:
// the exponential of a pair serves for both. A thread has eight columns of a row at a time.
template <class E>
__device__ void lay_decays(const Params& p, unsigned char* smem, int length, int64_t item) {
  const float* beta = reinterpret_cast<const float*>(smem + p.scores.rows_at);
  const float* G = beta + kChunk;
  float* matrix = matrix_of(p, smem);
  auto* out = static_cast<unsigned char*>(p.work.P) + item * (kChunk * kChunk * 2);
  const bool has_gate = p.gate == Gate::head;
#pragma unroll 1
  for (int i = thread_index(); i < kChunk * 8; i += kPrepareThreads) {
    const int r = i / 8, c = i % 8 * 8;
    float x[8] = {};
    if (c <= r) {
      const auto* from = reinterpret_cast<const float*>(smem) + r * scores::kPitch + c;
      float kk[8], qk[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        *reinterpret_cast<float4*>(kk + e) = *reinterpret_cast<const float4*>(from + e);
        *reinterpret_cast<float4*>(qk + e) =
            *reinterpret_cast<const float4*>(from + kMatrixBytes / 4 + e);
      }
      const float last = G[r], factor = beta[r];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // Above the diagonal the difference may be large: that entry is not used, but stays finite
        // where gates are.
        // Rows past the tokens are 0, or the inverse would meet what is not finite.
        const float decay = has_gate ? expf(min_or_nan(last - G[c + e], 80.0f)) : 1.0f;
        kk[e] = r < length ? factor * (kk[e] * decay) : 0.0f;
        x[e] = r < length && c + e <= r ? p.scale * (qk[e] * decay) : 0.0f;
      }
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        *reinterpret_cast<float4*>(matrix + r * scores::kPitch + c + e) =
            *reinterpret_cast<const float4*>(kk + e);
      }
    }
    *reinterpret_cast<uint4*>(out + place<64>(r, c)) = pack_operands<E>(x);
  }
}

template <class E, int K>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    prepare_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ PrepareShared s;
  begin_launch();
  if (is_wrong(p.tokens)) return;
  clear_handed(p);
  const unsigned parts = p.HV / p.prepare_heads, index = blockIdx.x / parts;
  const TokenTile tile = find_tile(p.tokens, index);
  if (tile.length == 0) return;
  const unsigned first = blockIdx.x % parts * p.prepare_heads;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    scores::load_half<E, scores::Past::zeros, K>(p.k, tile, key_head_of(p, first), half, smem);
    scores::load_half<E, scores::Past::zeros, K>(p.q, tile, key_head_of(p, first), half,
                                                 smem + p.scores.q_at);
  }
  copies_commit();
  copies_wait<0>();
  __syncthreads();  // q, k
  lay_norms<E, K>(p, smem, s);
  if (p.segment > 0) lay_squares<E, K>(smem, s);
  __syncthreads();  // norms; squares
  normalize_rows<E, K>(p, smem, s);
  __syncthreads();  // rows with norms
  lay_products<E, K>(p, smem);
  float* matrix = matrix_of(p, smem);
#pragma unroll 1
  for (unsigned i = 0; i < p.prepare_heads; ++i) {
    const unsigned head = first + i;
    const int64_t item = int64_t{index} * p.HV + head;
    lay_rows<K>(p, smem, s, tile, head, item);  // barriers inside: products, too
    const float* beta = reinterpret_cast<const float*>(smem + p.scores.rows_at);
    if (p.segment > 0 && thread_index() < kChunk) lay_bounds(p, beta, s);
    lay_decays<E>(p, smem, tile.length, item);
    __syncthreads();  // beta k k^T; bounds
    if (p.segment > 0 && thread_index() == 0) {
      const float sum = p.gate != Gate::none ? beta[2 * kChunk - 1] * kLog2e : 0.0f;
      p.work.bound[item] = s.bounds[0] + s.bounds[1] + sum;
    }
    invert<Triangles<64, scores::kPitch>>(matrix, thread_index() / 32, thread_index() % 32);
    store_result<E>(matrix, static_cast<E*>(p.work.T) + item * (kChunk * kChunk));
  }
}

}  // namespace deltic::gpu::gradient
