// The backward's chains in segments: how long, by predicted times. Plain numbers, tested on the
// host.
#pragma once

#include "cuda/schedule/segments.h"

namespace deltic::gpu::schedule {

// Microseconds of an H200: a step of a CTA with 64 or with 128 value columns, and of one that
// finds a segment's transfer, which stores nothing.
struct ChainCosts {
  float narrow, wide, transfer;
};
constexpr ChainCosts kHeadChain = {2.4f, 3.3f, 3.3f};
constexpr ChainCosts kChannelChain = {2.8f, 3.9f, 3.6f};
constexpr const ChainCosts& chain_costs_of(GateKind gate) {
  return gate == GateKind::kChannel ? kChannelChain : kHeadChain;
}
// Until a CTA takes its first step, with a chunk that leads up to it; a step of the merge of
// transfers; two launches more.
constexpr float kChainStartUs = 10.f, kChainMergeUs = 1.5f, kChainLaunchesUs = 10.f;

// What both chains have to do. jobs: states, one per sequence and value head; total: their chunks.
// remembered: the part of the jobs whose gates do not forget a state within a segment, so that
// their transfers are needed. Not known here: a quarter of the heads with gates per head, all
// with gates per channel, where one slow channel is enough, and without gates.
struct ChainWork {
  int jobs, total, longest, keys, values, sms;
  float remembered = 1.f;
};
ChainWork chain_work_of(const Problem& p, int num_sms);

struct ChainTime {
  float transfer, chains;  // with launches and merge; 0: whole sequences
  int columns;             // of a CTA of the chains
  float all() const { return transfer + chains; }
};
// The chains of whole sequences, or of n segments of `chunks`.
ChainTime chain_time(ChainCosts c, const ChainWork& w, int n, int chunks);
// Chunks per segment of the fastest division; 0: whole sequences, also where there is no GPU, or
// numbers are beyond 32 bits: such a call ends before it runs.
int choose_chain_segment(ChainCosts c, const ChainWork& w);
// Of a call: a function of the shape and, for `auto`, of the number of SMs.
int chain_segment(const Problem& p, int num_sms);

}  // namespace deltic::gpu::schedule
