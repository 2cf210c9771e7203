// What the kernels of the backward on Hopper get: the call's tensors, and where workspace lies.
#pragma once

#include <cuda.h>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/scores/params.h"
#include "cuda/sm80/scores/traits.h"
#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::gradient {

inline constexpr int kChunk = kTileTokens;
// A result of 64 x 64 in the shared memory of prepare, gates per head or none.
inline constexpr int32_t kMatrixBytes = kChunk * scores::kPitch * 4;
// Numbers of a token that its head's kernels share: the chains take those up to beta, the gradients
// beta and those behind it, per channel the first two.
enum Row : int {
  kInverse,  // 1 / beta
  kStart,    // gates per head: exp(G) / |k|
  kEnd,      // gates per head: exp(G_last - G) / |k|
  kQuery,    // gates per head: scale exp(G) / |q|
  kBeta,     // at least kLeastBeta
  kRawBeta,  // as the call has it
  kSum,      // gates per head: G
  kRawGate,  // gates per head: as the call has it
  kRowKinds
};
inline constexpr int kChainKinds = kBeta + 1;
// A beta of 0 has a gradient that 0 times something does not show. With 2^-40 in its place the
// error e = y / beta is there, and nothing else moves by more than 1e-12 of itself.
inline constexpr float kLeastBeta = 0x1p-40f;
// CTAs of the gradients, which go over chunks; sums over groups of value heads are theirs.
inline constexpr unsigned kGradientCtas = 132;

// Tiles are images of shared memory (tiles.cuh), of q's type, [tile][HV] of each.
struct Workspace {
  void *kE, *kR, *qE;  // [64][K], per channel: k exp(G), k exp(G_last - G), scale q exp(G)
  // [64][64]: (I + beta k k^T)^-1 - I and the scores, with decays. What the diagonal of the inverse
  // gives is added in fp32: a token's own part is not rounded on its way.
  void *T, *P;
  void *S, *dS;  // [V][K]: the state before a chunk, the gradient of the one after it
  void *e, *dz;  // [64][V]: v - S'^T k of every token, and the gradient of beta e
  float* last;   // [K]: exp(G_last)
  float* rows;   // [kRowKinds][64]
  // [CTA]: dq and dk over the value heads so far. Per channel [2][64][K], else as threads have
  // them.
  float* group_sums;
  // What rounding left of dz and, [N][HV][64][V], of first chunks' e: for dbeta.
  void *dz_rest, *e_rest;
  float* sums;  // [tile][HV][1 + gate width]: of A_log and dt_bias
  // Sequences in segments. bound: [tile][HV], log2 of the most that a chunk leaves of a state.
  // Of each piece and value head [piece][HV]: M, as [K][K] and what rounding left of it; then, in
  // blocks of 64 value columns as threads have them, the state after the piece and the gradient of
  // the one before it, fp32: from 0, and after the merge as they are.
  float* bound;
  void* M;
  float *after, *before;
  // Jobs of the chain forward that two of its CTAs share, [CTA]: how far it is (chains.cuh), set to
  // 0 by prepare; the state between the parts [V][K], as threads have it.
  uint32_t* handed;
  float* between;
};

struct Params {
  Tokens tokens;
  scores::Params scores;  // shared memory of the scores; q, k and what scales them
  int64_t num_tiles;      // an upper bound
  uint32_t N, H, HV, group;
  uint32_t prepare_heads;  // value heads that a CTA of prepare goes over: the group, or 1
  int32_t gate_width;      // 0, 1 or K

  Gate gate;
  deltic_gate_form gate_form;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  bool l2norm, wants_sums;
  bool dq_vectors, dk_vectors;  // may rows be stored sixteen bytes at a time?
  bool dg_pairs;                // may two channels of dg be stored at once?
  int32_t g_bytes;              // of a gate per channel, where rows are copied by sixteen; else 0
  float scale, lower_bound;

  Rows q, k;     // [B,T,H,K]
  Rows v, d_o;   // [B,T,HV,V]
  Rows beta, g;  // [B,T,HV]; [B,T,HV] or [B,T,HV,K]
  Rows dq, dk, dv, dbeta, dg;
  int32_t V;
  int32_t segment;     // chunks of a piece; 0: sequences stay whole
  int64_t num_pieces;  // an upper bound
  // Of the chains: value columns of a CTA, backwards and forwards; CTAs of the one forward.
  int32_t back_columns, forward_columns;
  uint32_t forward_ctas;
  Param A_log, dt_bias, dA_log, ddt_bias;
  States initial, d_final, d_initial;  // by strides, K-first or V-first
  Workspace work;
};

// Rows of whole chunks go by themselves, where a tensor's strides allow it.
struct RowsMap {
  CUtensorMap map;
  bool is_there;
};
struct Maps {
  RowsMap q, k, v, d_o, dv;  // dv: boxes of sixteen columns, a warp's
};

// First in every kernel: the next one's CTAs may take the SMs that this one's leave; what the one
// before wrote is visible.
__device__ inline void begin_launch() {
  grid_release();
  grid_wait();
}

// By the first CTA of prepare, whose launch is before that of the chains.
__device__ inline void clear_handed(const Params& p) {
  if (blockIdx.x > 0 || p.work.handed == nullptr) return;
  for (unsigned i = threadIdx.x; i < p.forward_ctas; i += blockDim.x) p.work.handed[i] = 0;
}

// Numbers of pieces: as those of tiles, sequence n has them from its first tile / segment + n on.
inline int64_t num_pieces(bool packed, int64_t N, int64_t T, int64_t segment) {
  const int64_t tiles = num_tiles(packed, N, T);
  if (segment == 0) return N;
  if (packed) return tiles / segment + N;
  const int64_t each = N > 0 ? tiles / N : 0;
  return each == 0 ? N : N * ((each + segment - 1) / segment);
}

// The q/k head of a value head; in 32 bits, as a division of 64 is a hundred instructions.
__device__ inline int64_t key_head_of(const Params& p, int64_t head) {
  return static_cast<unsigned>(head) / p.group;
}
// The number of a sequence's first tile.
__device__ inline int64_t first_tile_of(const Tokens& x, int64_t n) {
  return x.packed ? first_tile(x, n) : n * ((x.T + kTileTokens - 1) / kTileTokens);
}

}  // namespace deltic::gpu::gradient
