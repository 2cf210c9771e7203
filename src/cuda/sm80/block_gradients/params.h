// What the kernels of the building blocks' gradients get. A CTA of four warps has a tile of 64
// tokens; warp w has its rows 16 w and up.
#pragma once

#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::block_gradients {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kRows = kTileTokens / kWarps;  // of a warp
inline constexpr int kColumns = 32;                 // of a slice: a lane has one

// Of kkt, scores, wy and inverse.
struct Params {
  Tokens tokens;
  int64_t H, HV, K, V;  // q/k heads, value heads
  int64_t num_rows;     // B * T
  uint32_t group;       // value heads per q/k head
  uint32_t key_slices;  // of K
  uint32_t num_slices;  // CTAs of a tile and head
  int32_t W;            // chunk length
  Gate gate;
  bool has_beta;
  float scale;
  // Whether numbers came with 16 bits, so that products of them need no low parts: q and k; d_w;
  // d_u and v; A and what it is multiplied with.
  bool short_keys, short_w, short_u, short_aw, short_au;

  Rows q, k;             // [B,T,H,K]
  Rows v, d_u;           // [B,T,HV,V]
  Rows g, beta;          // cumulative [B,T,HV] or [B,T,HV,K]; [B,T,HV]
  Rows a, out;           // [B,T,HV,W]; inverse: one of them, out is the result
  Rows d_out;            // [B,T,HV,W]
  Rows d_w, d_kg, d_qg;  // [B,T,HV,K]
  Rows dq, dk, dv, dg, dbeta, da, dx;
  float* parts;  // [key slice][row][HV], of dbeta
};

// A tile, a head (of q and k, or of values) and a slice of columns; slices go fastest, so that the
// CTAs that read the same triangle run together.
struct Place {
  TokenTile tile;
  int64_t head;
  unsigned slice;
};
// Of the CTA, into shared memory: in registers it would be a tenth of them. A barrier inside;
// false: there is no such tile.
__device__ inline bool find_place(const Params& p, int64_t heads, Place& at) {
  if (threadIdx.x == 0) {
    const unsigned index = blockIdx.x, job = index / p.num_slices;
    const unsigned num = static_cast<unsigned>(heads), tile = job / num;
    at = {find_tile(p.tokens, tile), job - tile * num, index - job * p.num_slices};
  }
  __syncthreads();  // the place
  return at.tile.length > 0;
}

}  // namespace deltic::gpu::block_gradients
