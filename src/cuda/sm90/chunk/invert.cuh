// (I + L)^-1 of a chunk in shared memory, by two warps or by one: 8 x 8 blocks on the diagonal by
// substitution in fp32, then T21 = -(T22 L21) T11 for blocks of 8, 16 and 32 on the tensor cores
// (tf32). Lane = 4 g + x as in the accumulators of mma: rows g, g + 8, columns 2x, 2x + 1. L's
// 16 x 16 blocks below the diagonal come as operands, rounded (put_operand); those of the inverse
// stay so. One code and loops: instructions of all roles together should stay in the SM's cache (32
// KB or so).
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/fragments.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/chunk/tiles.h"

namespace deltic::gpu::chunk {

// Floats per row of L, of 64 or of 16 columns: 2x-th rows fall on different banks.
constexpr int kPitch = 68, kBlockPitch = 20;

struct Lane {
  int id, g, x;
  __device__ explicit Lane(int tid) : id(tid % 32), g(id / 4), x(id % 4) {}
};

// Two neighbours as operands of products alone.
__device__ inline void put_operand(float* p, float x, float y) {
  *reinterpret_cast<uint2*>(p) = make_uint2(to_tf32(x), to_tf32(y));
}
// A 16 x 16 block as two operands or accumulators of 16 x 8. P: floats from row to row.
struct Block {
  float m[2][4];
};
template <int P>
__device__ inline Block load_block(const float* p, const Lane& ln) {
  Block b;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 f = *reinterpret_cast<const float2*>(p + (8 * i + ln.g) * P + 8 * j + 2 * ln.x);
      b.m[j][2 * i] = f.x, b.m[j][2 * i + 1] = f.y;
    }
  return b;
}
template <int P>
__device__ inline void store_negative(float* p, const Block& b, const Lane& ln) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<float2*>(p + (8 * i + ln.g) * P + 8 * j + 2 * ln.x) =
          make_float2(round_tf32(-b.m[j][2 * i]), round_tf32(-b.m[j][2 * i + 1]));
}
// d += a b, b in shared memory.
template <int P>
__device__ inline void multiply(Block& d, const Block& a, const float* b, const Lane& ln) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float* p = b + (8 * k + 2 * ln.x) * P + 8 * j + ln.g;
      mma_accumulator_tf32(d.m[j], a.m[k], p[0], p[P]);
    }
}
// An accumulator as operand.
__device__ inline void round_block(Block& b) {
#pragma unroll
  for (int i = 0; i < 8; i++) b.m[i / 4][i % 4] = __uint_as_float(to_tf32(b.m[i / 4][i % 4]));
}

// Where block row i, block column j begins: in a square, or only those up to the diagonal.
struct Square {
  static constexpr int P = kPitch;
  __device__ static int at(int i, int j) { return 16 * i * P + 16 * j; }
};
struct Stairs {
  static constexpr int P = kBlockPitch;
  __device__ static int at(int i, int j) { return 16 * P * (i * (i + 1) / 2 + j); }
};

// One warp: the inverse of the upper (half = 0) or lower 32 x 32 block on the diagonal, in place. A
// lane holds a column of one of four 8 x 8 blocks. What lies above the diagonal of L may be
// anything.
template <class Place>
__device__ inline void invert_half(float* l, int half, const Lane& ln) {
  constexpr int P = Place::P;
  {
    const int i = 2 * half + ln.id / 16, c = ln.id % 8;
    float* const block = l + Place::at(i, i) + (ln.id & 8) * (P + 1);
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
      float sum = c == r ? 1.f : 0.f, odd = 0.f;
#pragma unroll
      for (int i = 0; i < r; i += 4) {
        const float4 row = *reinterpret_cast<const float4*>(block + r * P + i);
        sum -= row.x * x[i];
        if (i + 1 < r) odd -= row.y * x[i + 1];
        if (i + 2 < r) sum -= row.z * x[i + 2];
        if (i + 3 < r) odd -= row.w * x[i + 3];
      }
      x[r] = sum + odd;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; r++) {
      block[r * P + c] = round_tf32(x[r]);
      if (ln.id & 8) block[(r - 8) * P + c] = 0.f;
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 2 * half; i < 2 * half + 2;
       i++) {  // 16 x 16, rows 8 to 15 of the products are empty
    float* const upper = l + Place::at(i, i);
    float* const lower = upper + 8 * P;
    const float2 f = *reinterpret_cast<const float2*>(lower + 8 + ln.g * P + 2 * ln.x);
    const float* const b = lower + 2 * ln.x * P + ln.g;
    const float* const c = upper + 2 * ln.x * P + ln.g;
    float y[4] = {}, z[4] = {};
    mma_accumulator_tf32(y, {f.x, f.y, 0.f, 0.f}, round_tf32(b[0]), round_tf32(b[P]));
    mma_accumulator_tf32(z, {round_tf32(y[0]), round_tf32(y[1]), 0.f, 0.f}, c[0], c[P]);
    __syncwarp();  // L has been read
    *reinterpret_cast<float2*>(lower + ln.g * P + 2 * ln.x) =
        make_float2(round_tf32(-z[0]), round_tf32(-z[1]));
  }
  __syncwarp();
  const int i = 2 * half;
  float* const corner = l + Place::at(i + 1, i);
  Block y = {}, z = {};
  multiply<P>(y, load_block<P>(l + Place::at(i + 1, i + 1), ln), corner, ln);
  round_block(y);
  multiply<P>(z, y, l + Place::at(i, i), ln);
  __syncwarp();
  store_negative<P>(corner, z, ln);
}
// A warp: block row 2 or 3 of the lower left 32 x 32, negative, from L and the inverses of both
// halves. Row 3 reads L of row 2.
template <class Place>
__device__ inline void invert_corner(const float* l, int row, const Lane& ln, Block (&z)[2]) {
  constexpr int P = Place::P;
  Block y[2] = {};
#pragma unroll 1
  for (int k = 2; k <= row; k++) {
    const Block a = load_block<P>(l + Place::at(row, k), ln);
    multiply<P>(y[0], a, l + Place::at(k, 0), ln);
    multiply<P>(y[1], a, l + Place::at(k, 1), ln);
  }
  round_block(y[0]), round_block(y[1]);
  z[0] = z[1] = {};
  multiply<P>(z[0], y[0], l + Place::at(0, 0), ln);
  multiply<P>(z[0], y[1], l + Place::at(1, 0), ln);
  multiply<P>(z[1], y[1], l + Place::at(1, 1), ln);
}
// Of the first or the second scoring warpgroup, all or the two warps that invert. Constant numbers:
// where one is in a register and differs between warpgroups the race checker loses track.
template <int kFirst, int kCount>
__device__ inline void sync_own(int which) {
  if (which)
    named_sync(kFirst + 1, kCount);
  else
    named_sync(kFirst, kCount);
}
// All of it in place, by two warps, each of which begins with one half, half(); sync(): a barrier
// of the two.
template <class Place, class Half, class Sync>
__device__ inline void invert_by_two(float* l, Half half, Sync sync) {
  const Lane ln(thread_index());
  invert_half<Place>(l, half(), ln);
  sync();  // both halves are inverted
  Block z[2];
  invert_corner<Place>(l, 3 - half(), ln, z);
  sync();  // L of the lower half has been read
  store_negative<Place::P>(l + Place::at(3 - half(), 0), z[0], ln);
  store_negative<Place::P>(l + Place::at(3 - half(), 1), z[1], ln);
}
// kBarrier: a named one of two neighbours, + which.
template <int kBarrier>
__device__ inline void invert_in_place(float* l, int which) {
  invert_by_two<Square>(
      l, [] { return thread_index() / 32 % 2; }, [&] { sync_own<kBarrier, 64>(which); });
}
// The same by one warp, blocks up to the diagonal alone.
__device__ inline void invert_stairs(float* l, const Lane& ln) {
#pragma unroll 1
  for (int half = 0; half < 2; half++) invert_half<Stairs>(l, half, ln);
  __syncwarp();
#pragma unroll 1
  for (int row = 3; row >= 2; row--) {
    Block z[2];
    invert_corner<Stairs>(l, row, ln, z);
    __syncwarp();  // L of this row has been read
    store_negative<Stairs::P>(l + Stairs::at(row, 0), z[0], ln);
    store_negative<Stairs::P>(l + Stairs::at(row, 1), z[1], ln);
  }
  __syncwarp();
}

}  // namespace deltic::gpu::chunk
