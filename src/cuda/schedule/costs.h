// What the kernels on Hopper cost, in microseconds of an H200: every number that roles, segments,
// fused CTAs, chains and rounds are chosen by, as constants and as a table of words.
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
// The forward in roles. Three for one thing, because a packet's cost depends on what else runs:
struct CostsOfKind {
  // For sharing out the CTAs of one launch: not what a packet costs alone, but what gave the best
  // times in the rows of docs/benchmarks/h200.md (a ring of eight packets per carrier keeps fewer
  // preparers busy when carriers are few).
  Costs shares;
  // As measured, for choosing segments, where jobs are few; changes of jobs are counted apart there
  // (kPartUs).
  Costs measured;
  // What roles take where jobs fill the GPU, to compare with fused CTAs; per channel there are
  // none.
  Costs full = {};
};
constexpr CostsOfKind kHeadCosts = {
    {2.1f, 1.7f, 1.5f}, {2.2f, 1.75f, 2.6f}, {2.1f, 1.7f, 1.75f, 5.5f}};
constexpr CostsOfKind kChannelCosts = {{2.5f, 2.5f, 5.f, 4.f, true}, {2.2f, 2.2f, 5.2f}};
constexpr const CostsOfKind& costs_of(GateKind gate) {
  return gate == GateKind::kChannel ? kChannelCosts : kHeadCosts;
}
// As measured: until the first packet of a launch is there, a merge step, a change of state.
constexpr float kLaunchUs = 30.f, kMergeUs = 1.2f, kPartUs = 2.f;

// The forward in fused CTAs, as measured: the plan, and a CTA's first chunk; a step; from job to
// job.
struct FusedCosts {
  float begin, step, part;
};
constexpr FusedCosts kFusedCosts = {11.f, 3.7f, 5.f};

// The backward's chains: a step of a CTA with 64 or with 128 value columns, of one that finds a
// segment's transfer, which stores nothing, and of one of the chain forward with all columns; what
// memory takes of a step of both chains, of one state.
struct ChainCosts {
  float narrow, wide, transfer, forward, memory;
  bool is_mixed;  // a CTA of 64 columns backwards goes with all of them forwards
};
constexpr ChainCosts kHeadChain = {2.4f, 3.3f, 3.3f, 2.4f, 0.045f, false};
constexpr ChainCosts kChannelChain = {2.8f, 3.9f, 3.6f, 2.4f, 0.066f, true};
constexpr const ChainCosts& chain_costs_of(GateKind gate) {
  return gate == GateKind::kChannel ? kChannelChain : kHeadChain;
}
// Until a CTA takes its first step, with a chunk that leads up to it; a step of the merge of
// transfers; two launches more.
constexpr float kChainStartUs = 10.f, kChainMergeUs = 1.5f, kChainLaunchesUs = 10.f;
// The launches beside the chains, a chunk and value head, K = V = 128: a call of 4096 takes 0.79 ms
// without the chains' 0.35, one of 12288 per channel 3.58 without 0.95.
constexpr float kHeadRest = 0.11f, kChannelRest = 0.21f;
// One round more: the ends of its launches, where SMs wait for the last CTAs, and chains that have
// fewer neighbours. Measured per channel: two rounds of 48 heads 3.58 -> 3.72 ms, four of 16 heads
// of four sequences 4.59 -> 5.01.
constexpr float kRoundUs = 140.f;

// All of them. 0: there is none, or it is not counted apart.
struct CostRow {
  const char *who, *what;
  float head, channel;  // microseconds, gates per head (or none) and per channel
};
inline constexpr CostRow kCostTable[] = {
    {"carrier, whole state", "shares", kHeadCosts.shares.carry, kChannelCosts.shares.carry},
    {"carrier, whole state", "segments", kHeadCosts.measured.carry, kChannelCosts.measured.carry},
    {"carrier, whole state", "fused or not", kHeadCosts.full.carry, kChannelCosts.full.carry},
    {"carrier, 64 columns", "shares", kHeadCosts.shares.carry_half,
     kChannelCosts.shares.carry_half},
    {"carrier, 64 columns", "segments", kHeadCosts.measured.carry_half,
     kChannelCosts.measured.carry_half},
    {"carrier, 64 columns", "fused or not", kHeadCosts.full.carry_half,
     kChannelCosts.full.carry_half},
    {"preparer", "shares", kHeadCosts.shares.prepare, kChannelCosts.shares.prepare},
    {"preparer", "segments", kHeadCosts.measured.prepare, kChannelCosts.measured.prepare},
    {"preparer", "fused or not", kHeadCosts.full.prepare, kChannelCosts.full.prepare},
    {"from job to job", "shares", kHeadCosts.shares.part, kChannelCosts.shares.part},
    {"from job to job", "segments", kPartUs, kPartUs},
    {"from job to job", "fused or not", kHeadCosts.full.part, kChannelCosts.full.part},
    {"launch in roles", "all", kLaunchUs, kLaunchUs},
    {"merge step", "segments", kMergeUs, kMergeUs},
    {"fused CTA, step", "fused or not", kFusedCosts.step, 0},
    {"fused CTA, from job to job", "fused or not", kFusedCosts.part, 0},
    {"fused CTA, begin", "fused or not", kFusedCosts.begin, 0},
    {"chain, 64 columns", "backward", kHeadChain.narrow, kChannelChain.narrow},
    {"chain, 128 columns", "backward", kHeadChain.wide, kChannelChain.wide},
    {"chain, forwards", "backward", kHeadChain.forward, kChannelChain.forward},
    {"chain, transfer", "backward", kHeadChain.transfer, kChannelChain.transfer},
    {"chains' memory, a state", "backward", kHeadChain.memory, kChannelChain.memory},
    {"chain, begin", "backward", kChainStartUs, kChainStartUs},
    {"chains, merge step", "backward", kChainMergeUs, kChainMergeUs},
    {"chains, launches of transfers", "backward", kChainLaunchesUs, kChainLaunchesUs},
    {"beside the chains, a chunk and head", "rounds", kHeadRest, kChannelRest},
    {"a round more", "rounds", kRoundUs, kRoundUs}};

}  // namespace schedule
}  // namespace deltic::gpu
