// (I + L)^-1 of bf16 matrices by a warp: every number is a pair of bf16, and products of blocks are
// bf16 products. The high parts are the result.
#pragma once

#include "cuda/ptx/fragments.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::inverse {

// 64 columns: one matrix of 64 rows, or two of 32 beside each other. The pitch of 144 bytes lets
// eight rows' 16 bytes hit every bank once, as do the pitches of `low` for what is stored there.
template <int W_>
struct PairTile {
  static constexpr int W = W_, kPitch = 144, kBlocks = 4;  // bytes; blocks 16 x 16 on the diagonal
  static constexpr int kLow = 416, kLow10 = 272, kLow11 = 144;
  // L, then the high parts of X. The low parts of block (i, j), 16 x 16, are where (j, i) would be:
  // nothing above the diagonal is read or kept.
  alignas(16) unsigned char x[W * kPitch];
  // The low parts of blocks on the diagonal: 8 x 8 numbers in one piece.
  alignas(16) unsigned char low[kBlocks * kLow];

  // Bytes from x to block (i, j) of a matrix, 16 x 16, and to the one on the diagonal.
  static __device__ constexpr int at(int matrix, int i, int j) {
    return 16 * i * kPitch + (matrix * W + 16 * j) * 2;
  }
  static __device__ constexpr int at(int block) {
    return at(block / (W / 16), block % (W / 16), block % (W / 16));
  }
};

// Two fp32 as bf16, and what is left of them, again as bf16: together to 2^-17.
struct Pair {
  uint32_t high, low;
};
__device__ inline uint32_t round_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline Pair split_pair(float x, float y) {
  const uint32_t high = round_pair(x, y);
  return {high,
          round_pair(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u))};
}

// A 16 x 16 block, its 8 x 8 parts in the order (0, 0), (1, 0), (0, 1), (1, 1): as loaded a left
// operand; loaded with `trans` a right one, whose columns 8 n and up are parts 2 n and 2 n + 1.
struct Block {
  uint32_t x[4];
};
struct BlockPair {
  Block high, low;
};
template <bool kIsRight>
__device__ Block load_block(uint32_t address) {
  Block b;
  kIsRight ? ldmatrix_x4_trans(b.x, address) : ldmatrix_x4(b.x, address);
  return b;
}

__device__ inline void multiply(const Block& a, const Block& b, float (&c)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma<__nv_bfloat16>(c[n], {a.x[0], a.x[2]}, {a.x[1], a.x[3]}, {b.x[2 * n], b.x[2 * n + 1]});
  }
}
// L has no low part.
__device__ inline void multiply(const BlockPair& a, const Block& b, float (&c)[2][4]) {
  multiply(a.low, b, c);
  multiply(a.high, b, c);
}
// Without the product of the low parts, 2^-18.
__device__ inline void multiply(const BlockPair& a, const BlockPair& b, float (&c)[2][4]) {
  multiply(a.low, b.high, c);
  multiply(a.high, b.low, c);
  multiply(a.high, b.high, c);
}
// -c as the left operand of the next product: a lane's numbers are where it wants them.
__device__ inline BlockPair negated(const float (&c)[2][4]) {
  BlockPair b;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Pair pair = split_pair(-c[e / 2][e % 2 * 2], -c[e / 2][e % 2 * 2 + 1]);
    b.high.x[e] = pair.high, b.low.x[e] = pair.low;
  }
  return b;
}

// A warp's view of its tile: addresses of a lane, to which a block's place is added.
template <class Tile>
struct PairWarp {
  const Tile& tile;
  uint32_t x, low;     // of the tile
  uint32_t parts;      // of a block in x: the row of a part that this lane names when it is loaded
  uint32_t low_parts;  // the same of a block in low
  uint32_t entry;      // bytes from a part in x to the lane's pair
  int lane;

  __device__ PairWarp(const Tile& tile, int lane)
      : tile(tile), x(smem_u32(tile.x)), low(smem_u32(tile.low)), lane(lane) {
    const int part = lane / 8, row = lane % 8;
    parts = x + (part % 2 * 8 + row) * Tile::kPitch + part / 2 * 16;
    low_parts = low + row * 16 + (part == 3 ? Tile::kLow11 : part == 1 ? Tile::kLow10 : 0);
    entry = lane / 4 * Tile::kPitch + lane % 4 * 4;
  }

  // X of a block on the diagonal, whose part (0, 1) is zero and was never stored.
  template <bool kIsRight>
  __device__ BlockPair load_diagonal(int block) const {
    BlockPair b{load_block<kIsRight>(parts + Tile::at(block)),
                load_block<kIsRight>(low_parts + block * Tile::kLow)};
    b.high.x[2] = b.low.x[2] = 0;
    return b;
  }
  template <bool kIsRight>
  __device__ BlockPair load_corner(int matrix, int i, int j) const {
    return {load_block<kIsRight>(parts + Tile::at(matrix, i, j)),
            load_block<kIsRight>(parts + Tile::at(matrix, j, i))};
  }
  __device__ Block load_l(int matrix, int i, int j) const {
    return load_block<true>(parts + Tile::at(matrix, i, j));
  }

  // Block (i, j), and its low parts if somebody needs them.
  template <bool kWithLow>
  __device__ void store_corner(int matrix, int i, int j, const float (&c)[2][4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t to = x + entry + e % 2 * 8 * Tile::kPitch + e / 2 * 16;
      const float left = c[e / 2][e % 2 * 2], right = c[e / 2][e % 2 * 2 + 1];
      if constexpr (kWithLow) {
        const Pair pair = split_pair(left, right);
        store_shared(to + Tile::at(matrix, i, j), pair.high);
        store_shared(to + Tile::at(matrix, j, i), pair.low);
      } else {
        store_shared(to + Tile::at(matrix, i, j), round_pair(left, right));
      }
    }
  }
};

// The eight 8 x 8 blocks on the diagonal by substitution in fp32: four lanes each, two columns a
// lane. Only what lies below the diagonal is read.
template <class Tile>
__device__ void solve_eights(const PairWarp<Tile>& w) {
  const int block = w.lane / 8, half = w.lane / 4 % 2, q = w.lane % 4;
  const int place = Tile::at(block) + half * (8 * Tile::kPitch + 16);
  float v[8][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float row[8];
    if (i > 0) {
      const auto* from = w.tile.x + place + i * Tile::kPitch;
      unpack<__nv_bfloat16>(*reinterpret_cast<const uint4*>(from), row);
    }
    v[i][0] = i == 2 * q ? 1.0f : 0.0f;
    v[i][1] = i == 2 * q + 1 ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      v[i][0] -= row[j] * v[j][0];
      if (j > 0) v[i][1] -= row[j] * v[j][1];
    }
  }
  __syncwarp();  // L has been read by the block's four lanes
  const uint32_t low = w.low + block * Tile::kLow + half * Tile::kLow11;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Pair pair = split_pair(v[i][0], v[i][1]);
    store_shared(w.x + place + i * Tile::kPitch + 4 * q, pair.high);
    store_shared(low + i * 16 + 4 * q, pair.low);
  }
}

// 8 -> 16 of the four blocks on the diagonal: X10 = -(X11 L10) X00. The high and low parts of the
// left operand are the two halves of one product's 16 terms; its lower eight rows are idle.
template <class Tile>
__device__ void join_eights(const PairWarp<Tile>& w) {
  const int part = w.lane / 8, row = w.lane % 8;
  // Parts (0, 0) of two blocks on the diagonal, their high parts and then their low ones.
  const auto address = [&](int block) {
    block += part % 2;
    return part < 2 ? w.x + Tile::at(block) + row * Tile::kPitch
                    : w.low + block * Tile::kLow + row * 16;
  };
  const uint32_t to_11 = part < 2 ? 8 * Tile::kPitch + 16 : Tile::kLow11;
  uint32_t l[4], high[4], low[4];
  ldmatrix_x4_trans(l, w.x + Tile::at(part) + (8 + row) * Tile::kPitch);
#pragma unroll
  for (int block = 0; block < 4; block += 2) {
    uint32_t x00[4], x11[4];
    ldmatrix_x4_trans(x00, address(block));
    ldmatrix_x4(x11, address(block) + to_11);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float n[4] = {}, x[4] = {};
      mma<__nv_bfloat16>(n, {x11[e], x11[2 + e]}, {0, 0}, {l[block + e], l[block + e]});
      const Pair pair = split_pair(-n[0], -n[1]);
      mma<__nv_bfloat16>(x, {pair.high, pair.low}, {0, 0}, {x00[2 + e], 0});
      mma<__nv_bfloat16>(x, {pair.high, pair.low}, {0, 0}, {x00[e], x00[e]});
      const Pair result = split_pair(x[0], x[1]);
      high[block + e] = result.high, low[block + e] = result.low;
    }
  }
  __syncwarp();  // L10 has been read
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    store_shared(w.x + w.entry + Tile::at(block) + 8 * Tile::kPitch, high[block]);
    store_shared(w.low + block * Tile::kLow + Tile::kLow10 + w.lane * 4, low[block]);
  }
}

// 16 -> 32: X_ij = -(X_ii L_ij) X_jj of two neighbours on the diagonal.
template <class Tile>
__device__ void join_sixteens(const PairWarp<Tile>& w) {
  float x[2][2][4] = {};
  constexpr int kRows = Tile::W / 16;  // blocks on the diagonal of a matrix
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int j = 2 * e % kRows, matrix = 2 * e / kRows;
    float n[2][4] = {};
    multiply(w.template load_diagonal<false>(2 * e + 1), w.load_l(matrix, j + 1, j), n);
    multiply(negated(n), w.template load_diagonal<true>(2 * e), x[e]);
  }
  __syncwarp();  // L has been read
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int j = 2 * e % kRows, matrix = 2 * e / kRows;
    w.template store_corner<Tile::W == 64>(matrix, j + 1, j, x[e]);
  }
}

// 32 -> 64: the same of 32 x 32 blocks.
template <class Tile>
__device__ void join_thirtytwos(const PairWarp<Tile>& w) {
  BlockPair n[2][2];  // -X_ii L
  {
    const BlockPair x22 = w.template load_diagonal<false>(2);
    const BlockPair x32 = w.template load_corner<false>(0, 3, 2);
    const BlockPair x33 = w.template load_diagonal<false>(3);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Block l2 = w.load_l(0, 2, j), l3 = w.load_l(0, 3, j);
      float upper[2][4] = {}, lower[2][4] = {};
      multiply(x22, l2, upper);
      multiply(x32, l2, lower);
      multiply(x33, l3, lower);
      n[0][j] = negated(upper), n[1][j] = negated(lower);
    }
  }
  __syncwarp();  // L has been read
  {
    const BlockPair x11 = w.template load_diagonal<true>(1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[2][4] = {};
      multiply(n[i][1], x11, x);
      w.template store_corner<false>(0, 2 + i, 1, x);
    }
  }
  const BlockPair x00 = w.template load_diagonal<true>(0);
  const BlockPair x10 = w.template load_corner<true>(0, 1, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[2][4] = {};
    multiply(n[i][1], x10, x);
    multiply(n[i][0], x00, x);
    w.template store_corner<false>(0, 2 + i, 0, x);
  }
}

// Called by a warp; L is in place and visible, finite where no token is, and the high parts of the
// result are visible at the end, but for what lies above the blocks of 8 x 8 on the diagonal.
template <class Tile>
__device__ void invert_pairs(const PairWarp<Tile>& w) {
  solve_eights(w);
  __syncwarp();  // 8 x 8 blocks are there
  join_eights(w);
  __syncwarp();  // 16 x 16 blocks are there
  join_sixteens(w);
  __syncwarp();  // 32 x 32 blocks are there
  if constexpr (Tile::W == 64) {
    join_thirtytwos(w);
    __syncwarp();
  }
}

}  // namespace deltic::gpu::inverse
