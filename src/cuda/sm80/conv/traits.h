// Compile-time choices of the convolution's kernels.
#pragma once

namespace deltic::gpu::conv {

inline constexpr int kThreads = 128;
inline constexpr int kSingles = 2;         // sequences of a thread that have one token each
inline constexpr int kSingleThreads = 64;  // of their CTAs: 1.3 us of 11.7 sooner than 128
// Of those per SM: 64 registers; fp32 has 72, where sm_80 spills of 64.
template <class E>
inline constexpr int kSingleCtas = sizeof(E) == 2 ? 16 : 14;
inline constexpr int kDrafts = 8;  // tokens of a sequence that are in registers at once, at most
inline constexpr int kStagedCtas = 10;     // of those per SM: 48 registers
inline constexpr int kStagedChannels = 2;  // of a thread whose states go through shared memory

// kTaps: places for W weights. kExact: W is kTaps, else W is at most that and the first places are
// left out, by a branch that all threads take alike: a weight of 0 would make NaN of infinity.
// kVec: channels of a thread. kAhead: tokens that are on their way while one is worked on. kCtas:
// per SM, by which registers are given: 128 for four, 168 for three, 255 for two.
template <class E_, int kTaps_, bool kExact_, int kVec_, int kAhead_, int kCtas_>
struct Traits {
  using E = E_;
  static constexpr int kTaps = kTaps_, kVec = kVec_, kAhead = kAhead_, kCtas = kCtas_;
  static constexpr bool kExact = kExact_;
  static constexpr int kBefore = kTaps - 1;  // inputs before a token that it sees
  static_assert(kTaps >= 2 && kTaps <= 8);
};

// Channels whose rows are 16 bytes. Eight taps have twice the weights and inputs to hold.
template <class E, int kTaps>
inline constexpr int kChannels = kTaps <= 4 ? 16 / sizeof(E) : 4;

// Whole sequences: four CTAs per SM have 32 KB on their way, where 13 KB keep memory busy.
template <class E, int kTaps, bool kWide>
using Forward =
    Traits<E, kTaps, kTaps == 4, kWide ? kChannels<E, kTaps> : 1, 4, kTaps == 4 ? 4 : 2>;
// A few tokens per sequence: what is next is another sequence.
template <class E, int kTaps, bool kWide>
using Step = Traits<E, kTaps, kTaps == 4, kWide ? kChannels<E, kTaps> : 1, 1, kTaps == 4 ? 4 : 2>;
// One token per sequence: states are under way in shared memory.
template <class E>
using Single = Traits<E, 4, true, kChannels<E, 4>, 1, kSingleCtas<E>>;
// A few tokens from states in [D,S], number by number from shared memory: two channels, so that an
// odd number of inputs meets no bank twice.
template <class E>
using Staged = Traits<E, 4, true, kStagedChannels, 1, kStagedCtas>;
// The gradient has two rows on their way and holds inputs, later gradients and sums: four channels.
template <class E, int kTaps, bool kWide>
using Backward = Traits<E, kTaps, kTaps == 4, kWide ? 4 : 1, 4,
                        kTaps != 4       ? 2
                        : sizeof(E) == 2 ? 4
                                         : 3>;

}  // namespace deltic::gpu::conv
