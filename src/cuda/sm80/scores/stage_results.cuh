// Accumulators to shared memory, the inverse, and rows out. Results are 64 x 64 fp32 with kPitch:
// chunks of 16 and 32 tokens are blocks on the diagonal.
#pragma once

#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/scores/stage_load.cuh"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/invert.cuh"

namespace deltic::gpu::scores {

// What a CTA works on.
struct Shared {
  TokenTile tile;
  int64_t head;
};

// kkt and scores take the place of the tiles; beta and G of the rows lie behind both.
struct Results {
  float *kkt, *scores;
  const float *beta, *G;
  int length;  // tokens of the tile

  // smem: the dynamic shared memory by its name. Read back from memory it would be an address of
  // any space, and every access a slower one.
  __device__ Results(const Params& p, unsigned char* smem, const Shared& shared)
      : kkt(reinterpret_cast<float*>(smem)),
        scores(kkt + (p.kkt.present ? kTileTokens * kPitch : 0)),
        beta(reinterpret_cast<const float*>(smem + p.rows_at)),
        G(beta + kTileTokens),
        length(shared.tile.length) {}
};

// beta, and G of a gate per head, of the tile's rows. Called by all threads; a barrier must follow.
__device__ inline void load_row_values(const Params& p, const TokenTile& tile, int64_t head,
                                       unsigned char* smem) {
  float *beta = reinterpret_cast<float*>(smem + p.rows_at), *G = beta + kTileTokens;
  if (const int r = thread_index(); r < kTileTokens) {
    const bool has_row = r < tile.length;
    const int64_t t = tile.begin + r;
    beta[r] = has_row && p.beta_kind != BetaKind::none
                  ? beta_value(p.beta_form,
                               load(p.beta.data, p.beta.dtype, offset(p.beta, tile.batch, t, head)))
                  : 1.0f;
    G[r] = has_row && p.gate == Gate::head
               ? load(p.g.data, p.g.dtype, offset(p.g, tile.batch, t, head))
               : 0.0f;
  }
}

// The lane's pair of an 8 x 8 block of groups (i, j), times exp(G_i - G_j) for gates per head and
// times a factor of the row. Rows past the tokens are 0, or the inverse would meet what is not
// finite; what lies above the diagonal is left as it is and selected away on the way out.
template <class Tr>
__device__ void put_pair(const Params& p, const Results& s, float* m, int i, int j, int lane,
                         float factor, float x, float y) {
  const int row = 8 * i + lane / 4, column = 8 * j + lane % 4 * 2;
  if constexpr (!Tr::kPerChannel) {
    if (p.gate == Gate::head) {
      // Above the diagonal the difference may be large: that entry is not used, but stays finite
      // where gates are.
      x *= expf(min_or_nan(s.G[row] - s.G[column], 80.0f));
      y *= expf(min_or_nan(s.G[row] - s.G[column + 1], 80.0f));
    }
  }
  const bool is_past = row >= s.length;
  *reinterpret_cast<float2*>(&m[row * kPitch + column]) = {is_past ? 0.0f : factor * x,
                                                           is_past ? 0.0f : factor * y};
}

// A block of k k^T and of q k^T.
template <class Tr>
__device__ void put_block(const Params& p, const Results& s, int i, int j, int lane,
                          const float (&c)[4]) {
  if constexpr (Tr::kHasK) {
    put_pair<Tr>(p, s, s.kkt, i, j, lane, s.beta[8 * i + lane / 4], c[0], c[1]);
  }
  if constexpr (Tr::kHasQ) put_pair<Tr>(p, s, s.scores, i, j, lane, p.scale, c[2], c[3]);
}

// The entries of a group's own block, each from its level.
__device__ inline void select_levels(const float (&c)[3][4], float diagonal, int lane,
                                     float (&out)[4]) {
  const int row = lane / 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int differ = row ^ (lane % 4 * 2 + e % 2);
    out[e] = differ >= 4 ? c[0][e] : differ >= 2 ? c[1][e] : differ == 1 ? c[2][e] : diagonal;
  }
}

// Rows of a result: entry (i, j) is kept where j - i < limit (0: below the diagonal; 1: and on it),
// else 0.
template <class E>
__device__ void store_rows(const Params& p, const Rows& x, bool vectors, const TokenTile& tile,
                           int64_t head, int limit, const float* m) {
  E* rows = static_cast<E*>(x.data) + offset(x, tile.batch, tile.begin, head);
  constexpr int N = Vector<E>::N;
  const int step = vectors ? N : 1;
  const int shift = 31 - __clz(p.W) - (vectors ? 31 - __clz(N) : 0);  // log2(W / step)
  for (int i = thread_index(); i >> shift < tile.length; i += kThreads) {
    const int r = i >> shift, c = (i & ((1 << shift) - 1)) * step, first = r & ~(p.W - 1);
    const float* from = m + r * kPitch + first + c;
    const int kept = r - first + limit - c;  // so many from here on
    if (!vectors) {
      rows[r * x.st + c] = from_float<E>(kept > 0 ? *from : 0.0f);
      continue;
    }
    Vector<E> v;
#pragma unroll
    for (int e = 0; e < N; e += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + e);
      v.x[e] = from_float<E>(kept > e ? y.x : 0.0f);
      v.x[e + 1] = from_float<E>(kept > e + 1 ? y.y : 0.0f);
      v.x[e + 2] = from_float<E>(kept > e + 2 ? y.z : 0.0f);
      v.x[e + 3] = from_float<E>(kept > e + 3 ? y.w : 0.0f);
    }
    *reinterpret_cast<Vector<E>*>(rows + r * x.st + c) = v;
  }
}

// Called by all threads, after a barrier behind put_block.
template <class Tr>
__device__ void finish(const Params& p, unsigned char* smem, const Shared& shared) {
  const Results s(p, smem, shared);
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const auto out = [&](const Rows& x, bool vectors, int limit, const float* m) {
    with_dtype(x.dtype, [&](auto* tag) {
      store_rows<std::remove_pointer_t<decltype(tag)>>(p, x, vectors, shared.tile, shared.head,
                                                       limit, m);
    });
  };
  if constexpr (Tr::kHasQ) out(p.scores, p.scores_vectors, 1, s.scores);
  if constexpr (Tr::kHasQ && Tr::kHasK) {
    // Barriers inside; the last one is behind the last write.
    if (p.W == 64) {
      invert<Triangles<64, kPitch>>(s.kkt, warp, lane);
    } else if (p.W == 32) {
      invert<Triangles<32, kPitch>>(s.kkt, warp, lane);
    } else {
      invert<Triangles<16, kPitch>>(s.kkt, warp, lane);
    }
  }
  if constexpr (Tr::kHasK) out(p.kkt, p.kkt_vectors, Tr::kHasQ ? 1 : 0, s.kkt);
}

}  // namespace deltic::gpu::scores
