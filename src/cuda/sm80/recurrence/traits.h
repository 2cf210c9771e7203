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
// kOneStage: no sequence has more tokens than a stage, as in decode, no trees, and all states can
// be moved in runs of neighbours (others go through the general kernel). Then nothing is loaded
// ahead, and the registers saved make room for three CTAs per SM instead of two (K up to 128): the
// state goes through registers once, so what counts is how many bytes are under way. Same bits.
// kRecord: decode leaves a record of its tokens instead of states.
template <int kBlocks_, bool kPerChannel_, bool kOneStage_, bool kRecord_ = false>
struct Traits {
  static constexpr int kBlocks = kBlocks_, kWidth = 32 * kBlocks;
  static constexpr bool kPerChannel = kPerChannel_, kOneStage = kOneStage_, kRecord = kRecord_;
  // The state is asked for before the tokens; with a record and K above 128 there would be two
  // places that load states, and registers would spill.
  static constexpr bool kLoadsFirst = !kRecord || kBlocks <= 4;
  static_assert(!kRecord || !kOneStage, "branches of a tree load states once more");
  static_assert(kBlocks >= 1 && kBlocks <= 8, "K is at most 256");
  static constexpr int kCtasPerSm = kBlocks > 4 ? 1 : kOneStage ? 3 : 2;  // one more would spill
  static constexpr int kCtasElsewhere = kBlocks > 4 ? 1 : 2;
};

}  // namespace deltic::gpu::recurrence
