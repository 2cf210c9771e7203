// Compile-time choices of the decode kernel.
#pragma once

namespace deltic::gpu::decode {

// A thread has 8 channels (a "piece" of the state's width) of kColumns value columns, 64 or 128
// bytes on their way: four or eight requests of 16 bytes. V-first the pieces of a column are
// neighbouring lanes, and a warp needs no other. K-first the lanes along V come first, so that a
// row of the slice is read in whole lines, and the pieces are over all warps.
inline constexpr int kChannels = 8;
inline constexpr int kThreads = 128, kWarps = kThreads / 32;
// Tokens that are prepared together. Eight: the rest of what shared memory has beside six states.
inline constexpr int kStageTokens = 8;

// kTrees: tokens may start from the state after another one than the one before them.
template <class E_, int kWidth_, bool kVFirst_, bool kPerChannel_, bool kTrees_ = false,
          int kCtasPerSm_ = 0>
struct Traits {
  using E = E_;                           // of the states: fp32 or bf16
  static constexpr int kWidth = kWidth_;  // K
  static constexpr bool kVFirst = kVFirst_, kPerChannel = kPerChannel_, kTrees = kTrees_;
  static constexpr int kColumns = 16 / sizeof(E);
  static constexpr int kPieces = kWidth / kChannels;
  static constexpr int kLanesV = kThreads / kPieces;  // threads along V
  static constexpr int kSlice = kLanesV * kColumns;   // value columns of a CTA
  // The most whose registers do not spill (README.md has them).
  static constexpr int kMostCtas = sizeof(E) == 2                               ? (kVFirst ? 5 : 4)
                                   : kVFirst || (kWidth == 128 && !kPerChannel) ? 6
                                                                                : 5;
  static constexpr int kCtasPerSm = kCtasPerSm_ > 0 ? kCtasPerSm_ : kMostCtas - (kTrees ? 1 : 0);
  // The state stays in shared memory between the two passes of a token: bf16, whose numbers
  // unpacked are more than the registers hold.
  static constexpr bool kStays = sizeof(E) == 2;
  // fp32 V-first: two runs of four channels half a width apart, so that lanes read neighbours.
  static constexpr bool kHalves = kVFirst && sizeof(E) == 4;
  static_assert(kPieces == 8 || kPieces == 16, "a warp has whole columns of pieces");
  static_assert(kLanesV >= kStageTokens, "kPieces threads prepare a token");
  static_assert(kLanesV <= 32, "K-first a warp has whole rows of the slice");
};

}  // namespace deltic::gpu::decode
