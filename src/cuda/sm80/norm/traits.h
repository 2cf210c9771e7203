// Compile-time choices of the gated norm's kernels.
#pragma once

namespace deltic::gpu::norm {

inline constexpr int kThreads = 128;
inline constexpr unsigned kPrefetched = 4;  // rows of a lane that are asked for ahead of the launch

// A row of up to kLanes * kRuns * kVec numbers of type E belongs to kLanes neighbouring lanes; each
// has kRuns runs of 16 bytes, kLanes runs apart.
template <class E_, int kLanes_, int kRuns_>
struct Traits {
  using E = E_;
  static constexpr int kLanes = kLanes_, kRuns = kRuns_;
  static constexpr int kVec = 16 / sizeof(E);
  static constexpr int kHeld = kRuns * kVec;         // numbers of a lane
  static constexpr int kWidth = kLanes * kHeld;      // the widest row
  static constexpr int kGroups = kThreads / kLanes;  // rows of a CTA at a time
  // Registers: 64 for rows of one run, so that eight CTAs of an SM have 32 KB on their way; the
  // gradient 96, five CTAs. Wider rows have more of them in a lane.
  static constexpr int kForwardCtas = kRuns == 1 ? 8 : kRuns == 2 ? 5 : 2;
  static constexpr int kBackwardCtas = kRuns == 1 ? 5 : kRuns == 2 ? 3 : 2;
  static_assert(kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "lanes of one warp exchange sums");
};

}  // namespace deltic::gpu::norm
