// w = A (beta k exp(G)), u = A (beta v), k exp(G_last - G) and q exp(G): a CTA of four warps has a
// tile of 64 tokens of one value head, and takes its columns in slices.
#pragma once

#include "cuda/tile/gates.cuh"
#include "cuda/tile/lower.cuh"
#include "cuda/tile/multiply.cuh"

namespace deltic::gpu::wy {

struct Params {
  Tokens tokens;
  int64_t heads, group, num_items;  // value heads; of them, per q/k head; tiles times heads
  int64_t K, V;
  int32_t W;
  Gate gate;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  Rows q, k, v, g, beta, a;  // g is cumulative
  Rows w, u, kg, qg;
};

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kColumns = 32;  // of a slice
inline constexpr int kPitchA = kLowerPitch, kPitchX = kColumns + 4;

struct Shared {
  alignas(16) float a[kLowerFloats];  // chunks as blocks on the diagonal
  alignas(16) float x[kTileTokens * kPitchX];
  float beta[kTileTokens];
};

// Where a CTA works.
struct Place {
  TokenTile tile;
  int64_t head;
};

__device__ inline float gate_at(const Params& p, const Place& at, int row, int64_t channel) {
  if (p.gate == Gate::none) return 0.0f;
  const int64_t index = offset(p.g, at.tile.batch, at.tile.begin + row, at.head);
  return load(p.g.data, p.g.dtype, index + (p.gate == Gate::channel ? channel : 0));
}

__device__ inline void load_a(const Params& p, const Place& at, Shared& s) {
  load_lower<kThreads>(p.a, at.tile, at.head, p.W, 1, s.a);
  for (int r = threadIdx.x; r < kTileTokens; r += kThreads) {
    s.beta[r] = p.beta_kind != BetaKind::none && r < at.tile.length
                    ? beta_value(p.beta_form,
                                 load(p.beta.data, p.beta.dtype,
                                      offset(p.beta, at.tile.batch, at.tile.begin + r, at.head)))
                    : 1.0f;
  }
}

// Columns [first, first + 32) of beta k exp(G) into s.x; k exp(G_last - G) and q exp(G) straight
// out.
__device__ inline void lay_keys(const Params& p, const Place& at, int64_t first, Shared& s) {
  const int64_t hk = static_cast<unsigned>(at.head) / static_cast<unsigned>(p.group),
                b = at.tile.batch;
  for (int i = threadIdx.x; i < kTileTokens * kColumns; i += kThreads) {
    const int r = i / kColumns;
    const int64_t d = first + i % kColumns, t = at.tile.begin + r;
    float x = 0;
    if (r < at.tile.length && d < p.K) {
      const float G = gate_at(p, at, r, d),
                  k = load(p.k.data, p.k.dtype, offset(p.k, b, t, hk) + d);
      x = s.beta[r] * k * expf(G);
      if (p.kg.present) {
        const int last = min(r / p.W * p.W + p.W, at.tile.length) - 1;
        store(p.kg.data, p.kg.dtype, offset(p.kg, b, t, at.head) + d,
              k * expf(gate_at(p, at, last, d) - G));
      }
      if (p.qg.present) {
        const float q = load(p.q.data, p.q.dtype, offset(p.q, b, t, hk) + d);
        store(p.qg.data, p.qg.dtype, offset(p.qg, b, t, at.head) + d, q * expf(G));
      }
    }
    s.x[r * kPitchX + i % kColumns] = x;
  }
}

__device__ inline void lay_values(const Params& p, const Place& at, int64_t first, Shared& s) {
  for (int i = threadIdx.x; i < kTileTokens * kColumns; i += kThreads) {
    const int r = i / kColumns;
    const int64_t d = first + i % kColumns;
    s.x[r * kPitchX + i % kColumns] =
        r < at.tile.length && d < p.V
            ? s.beta[r] * load(p.v.data, p.v.dtype,
                               offset(p.v, at.tile.batch, at.tile.begin + r, at.head) + d)
            : 0.0f;
  }
}

// out = A x for the slice: warp w has rows 16 w and up, and multiplies blocks up to the diagonal.
__device__ inline void multiply_slice(const Params& p, const Place& at, int64_t first,
                                      int64_t width, const Rows& out, const Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float c[2][2][4] = {};
  for (int j = 16 * warp / p.W * p.W / 16; j <= warp; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_blocks<kPitchA, kPitchX>(s.a + 16 * warp * kPitchA + 16 * j,
                                        s.x + 16 * j * kPitchX + 16 * n, lane, c[n]);
    }
  }
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int n = e / 8, half = e / 4 % 2, i = e % 4;
    const int r = 16 * warp + lane / 4 + i / 2 * 8;
    const int64_t d = first + 16 * n + 8 * half + lane % 4 * 2 + i % 2;
    if (r < at.tile.length && d < width) {
      store(out.data, out.dtype, offset(out, at.tile.batch, at.tile.begin + r, at.head) + d,
            c[n][half][i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) wy_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  if (is_wrong(p.tokens)) return;
  const unsigned index = blockIdx.x, heads = static_cast<unsigned>(p.heads);
  if (index >= p.num_items) {
    const int64_t n = index - p.num_items;
    zero_padding(p.tokens, p.w, p.heads, p.K, n, kPaddingCtas);
    zero_padding(p.tokens, p.u, p.heads, p.V, n, kPaddingCtas);
    zero_padding(p.tokens, p.kg, p.heads, p.K, n, kPaddingCtas);
    zero_padding(p.tokens, p.qg, p.heads, p.K, n, kPaddingCtas);
    return;
  }
  const Place at{find_tile(p.tokens, index / heads), index % heads};
  if (at.tile.length == 0) return;
  load_a(p, at, s);
  __syncthreads();  // beta is there
  for (int64_t first = 0; first < p.K; first += kColumns) {
    lay_keys(p, at, first, s);
    __syncthreads();  // the slice is there
    multiply_slice(p, at, first, p.K, p.w, s);
    __syncthreads();  // it has been read
  }
  for (int64_t first = 0; p.u.present && first < p.V; first += kColumns) {
    lay_values(p, at, first, s);
    __syncthreads();  // as above
    multiply_slice(p, at, first, p.V, p.u, s);
    __syncthreads();
  }
}

}  // namespace deltic::gpu::wy
