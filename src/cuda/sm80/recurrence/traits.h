// Compile-time choices of the recurrence's kernel.
#pragma once

namespace deltic::gpu::recurrence {

// A warp holds the state of 8 value columns over all of K in registers: eight lanes along K, each
// with four neighbouring channels of every 32, and four lanes along V with two columns each. So a
// token costs one reduction over 8 lanes (three shuffle steps), a V-first state is read in whole
// lines and a K-first one in whole sectors.
inline constexpr int kLanesK = 8, kLanesV = 4, kThreadColumns = 2;
inline constexpr int kWarpColumns = kLanesV * kThreadColumns;
// Warps share the staged tokens. Eight: 64 columns per CTA; for K = 128 that is 32 KB of state in
// flight per CTA and 4 CTAs per SM.
inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kColumns = kWarps * kWarpColumns;
inline constexpr int kStageTokens = kWarps;  // a warp prepares one token of a stage

// kBlocks: blocks of 32 channels; K is filled up with zeros.
template <int kBlocks_, bool kPerChannel_>
struct Traits {
  static constexpr int kBlocks = kBlocks_, kWidth = 32 * kBlocks;
  static constexpr bool kPerChannel = kPerChannel_;
  static_assert(kBlocks >= 1 && kBlocks <= 8, "K is at most 256");
  static constexpr int kCtasPerSm = kBlocks <= 4 ? 2 : 1;  // one more would spill
};

}  // namespace deltic::gpu::recurrence
