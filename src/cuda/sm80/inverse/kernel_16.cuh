// (I + A)^-1 of width 16: a warp has eight matrices, four lanes each, by substitution in registers.
#pragma once

#include "cuda/sm80/inverse/params.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::inverse {

inline constexpr int kMatrices16 = 8;  // of a warp

// A row of one head is only 32 or 64 bytes; those of eight neighbouring heads are 256 or 512 in one
// piece. They lie so in shared memory too: of an asynchronous copy, pieces that go to places apart
// are requests of their own (bf16: four times as many; H = 64: 39 us instead of 33).
template <class E>
struct Matrices16 {
  static constexpr int W = 16, kMatrices = kMatrices16;
  static constexpr int N = Vector<E>::N, kPerRow = W / N;
  static constexpr int kRows = 32 / (kMatrices * kPerRow);  // of all matrices, at a time
  E x[W][kMatrices][W];
};

// The vectors of a lane. Its matrix is not the one that it inverts: that is `lane / 4`.
template <class E>
struct Vectors16 {
  using M = Matrices16<E>;
  int matrix, row, column;
  int64_t place;  // of the first, in the tensor
  int left;
  __device__ Vectors16(const Rows& x, int64_t place_of_own, int left_of_own, int lane)
      : matrix(lane / M::kPerRow % M::kMatrices),
        row(lane / (M::kPerRow * M::kMatrices)),
        column(lane % M::kPerRow * M::N),
        place(__shfl_sync(0xFFFFFFFFu, place_of_own, 4 * matrix) + row * x.st + column),
        left(__shfl_sync(0xFFFFFFFFu, left_of_own, 4 * matrix) - row) {}

  // All of a row, but nothing of the first: memory is read in 64 bytes. Rows past the tokens stay
  // as they are: row i of the result takes nothing from the rows behind it.
  __device__ void load(const Rows& a, M& tile) const {
    const MatrixRows<const E> from(a, place);
#pragma unroll
    for (int r = 0; r < M::W; r += M::kRows) {
      if (r + row > 0 && r < left) copy_async(&tile.x[r + row][matrix][column], from[r]);
    }
  }
  __device__ void store(const Rows& out, const M& tile) const {
    const MatrixRows<E> to(out, place);
#pragma unroll
    for (int r = 0; r < M::W; r += M::kRows) {
      const uint4 words = *reinterpret_cast<const uint4*>(&tile.x[r + row][matrix][column]);
      if (r < left) *reinterpret_cast<uint4*>(to[r]) = words;
    }
  }
};

// What lies below the diagonal in row i.
template <class E>
__device__ void load_row(const E* row, int i, float (&out)[16]) {
  constexpr int N = Vector<E>::N;
#pragma unroll
  for (int j = 0; j < 16; j += N) {
    if (j >= i) break;
    float y[N];
    unpack<E>(*reinterpret_cast<const uint4*>(row + j), y);
#pragma unroll
    for (int e = 0; e < N; ++e) out[j + e] = y[e];
  }
}

template <class E, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) inverse_16_kernel(const __grid_constant__ Params p) {
  using M = Matrices16<E>;
  constexpr bool kIsShort = sizeof(E) == 2;
  __shared__ __align__(16) M tiles[kWarps], results[kIsShort ? kWarps : 1];
  start(p.tokens);
  if (is_wrong(p.tokens)) return;
  if (blockIdx.x >= p.num_item_ctas) {
    zero_padding(p.tokens, p.out, p.heads, M::W, blockIdx.x - p.num_item_ctas, kPaddingCtas);
    return;
  }
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned matrix = lane / 4, q = lane % 4;  // columns 4 q to 4 q + 3
  const Matrix at = find_matrix<M::W>(p, (blockIdx.x * kWarps + warp) * M::kMatrices + matrix);
  const int64_t to = offset(p.out, at.batch, at.begin, at.head);
  const Vectors16<E> in(p.a, offset(p.a, at.batch, at.begin, at.head), at.left, lane);
  grid_wait();
  in.load(p.a, tiles[warp]);
  copies_commit();
  copies_wait<0>();
  __syncwarp();  // the tile is there, all lanes' vectors

  const MatrixRows<E> own(p.out, to + 4 * q);
  float x[16][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
    load_row<E>(tiles[warp].x[i][matrix], i, row);
#pragma unroll
    for (int k = 0; k < 4; ++k) x[i][k] = k == i % 4 && q == i / 4 ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) {
#pragma unroll
      for (int k = 0; k < 4 && k <= j; ++k) x[i][k] -= row[j] * x[j][k];
    }
    // Four columns of fp32 are 16 bytes. Of others two lanes' are: they meet in shared memory.
    if constexpr (kIsShort) {
      const float y[8] = {x[i][0], x[i][1], x[i][2], x[i][3]};
      const uint4 words = pack<E>(y);
      *reinterpret_cast<uint2*>(&results[warp].x[i][matrix][4 * q]) = make_uint2(words.x, words.y);
    } else if (i < at.left) {
      *reinterpret_cast<float4*>(own[i]) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
    }
  }
  if constexpr (kIsShort) {
    __syncwarp();  // all lanes' columns are there
    Vectors16<E>(p.out, to, at.left, lane).store(p.out, results[warp]);
  }
}

}  // namespace deltic::gpu::inverse
