// What the kernel of scores gets: kkt, scores, or both with the inverse.
#pragma once

#include "cuda/tile/chunks.cuh"

namespace deltic::gpu::scores {

struct Params {
  Tokens tokens;
  int64_t heads;      // value heads
  uint32_t group;     // of them, per q/k head
  int64_t num_items;  // tiles times heads
  int32_t K, width;   // width: K filled up to a multiple of 16
  int32_t W;          // chunk length
  Gate gate;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  float scale;

  Rows q, k;         // [B,T,H,K]
  Rows g, beta;      // cumulative [B,T,HV] or [B,T,HV,K]; [B,T,HV]
  Rows kkt, scores;  // [B,T,HV,W], each where asked for
  bool q_vectors, k_vectors, g_vectors, kkt_vectors, scores_vectors;  // 16 bytes at a time

  int32_t row_bytes, g_row_bytes;           // of q and k, of g, in shared memory
  int32_t q_at, g_at, rows_at, smem_bytes;  // bytes; k is first, values of rows are last
};

}  // namespace deltic::gpu::scores
