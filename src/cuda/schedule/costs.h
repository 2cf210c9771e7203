// What the forward on Hopper costs, in microseconds of an H200: the numbers that roles and segments
// are chosen by.
#pragma once

namespace deltic::gpu {

enum class GateKind { kHead, kChannel };  // one decay per head (or none), per channel

namespace schedule {

constexpr int kChunk = 64, kWidth = 128;  // tokens per chunk; K and V are filled up to this

struct Costs {  // of one SM per chunk; carry_half: of 64 value columns
  float carry, carry_half, prepare;
  float part = 0.f;       // from one job to the next
  bool in_pairs = false;  // carriers (in_pairs of roles.h)
};
struct CostsOfKind {
  // For sharing out the CTAs of one launch: not what a packet costs alone, but what gave the best
  // times in the rows of docs/benchmarks/h200.md (a ring of eight packets per carrier keeps fewer
  // preparers busy when carriers are few).
  Costs shares;
  // As measured, for choosing segments; changes of jobs are counted apart there (kPartUs).
  Costs measured;
};
constexpr CostsOfKind kHeadCosts = {{2.1f, 1.7f, 1.5f}, {2.2f, 1.75f, 2.6f}};
constexpr CostsOfKind kChannelCosts = {{2.5f, 2.5f, 5.f, 4.f, true}, {2.2f, 2.2f, 5.2f}};
constexpr const CostsOfKind& costs_of(GateKind gate) {
  return gate == GateKind::kChannel ? kChannelCosts : kHeadCosts;
}

// As measured: until the first packet of a launch is there, a merge step, a change of state.
constexpr float kLaunchUs = 30.f, kMergeUs = 1.2f, kPartUs = 2.f;

}  // namespace schedule
}  // namespace deltic::gpu
