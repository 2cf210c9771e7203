// Compile-time choices of the general backward.
#pragma once

namespace deltic::gpu::backward {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
// Tokens of a chunk, whatever the call's chunk length is: the function is the same. Pairs of tokens
// are walked one by one, which is quadratic in it; states between chunks go through memory, which
// falls with it. At 16 the pairs take a tenth of the time.
inline constexpr int kChunk = 16;
// CTAs that walk over all items: two per SM of the largest GPUs of today. Scratch is theirs.
inline constexpr unsigned kMaxCtas = 264;
// CTAs per q/k head that collect a segment's gradients, each with sums of parameters of its own.
inline constexpr unsigned kCollectors = 64;

// kWidth: keys, filled up with zeros. kColumns: value columns of a CTA. The state and its gradient
// are in shared memory, 2 x 4 kWidth (kColumns + 4) bytes: 70 KB (128, 64), 74 KB (256, 32).
// kHasGv: value columns have decays of their own.
template <int kWidth_, int kColumns_, bool kHasGv_>
struct Traits {
  static constexpr int kWidth = kWidth_, kColumns = kColumns_;
  static constexpr bool kHasGv = kHasGv_;
  static constexpr int kStatePitch = kColumns + 4;  // rows by threads, 16 bytes each: no conflicts
  static constexpr int kState = kWidth * kColumns;  // floats in memory
  static constexpr int kLanes = kWidth / 32;        // channels of a lane where a warp has a row
  // Threads along columns, then so many parts of the keys; along keys, so many parts of columns.
  static constexpr int kKeyParts = kThreads / kColumns, kPartKeys = kWidth / kKeyParts;
  static constexpr int kColumnParts = kThreads / kWidth, kPartColumns = kColumns / kColumnParts;
  static_assert(kWidth % 64 == 0 && kWidth <= kThreads, "a thread has one channel");
  static_assert(kWidth % kKeyParts == 0 && kColumns % (4 * kColumnParts) == 0);
};

}  // namespace deltic::gpu::backward
