// The backward's chains in segments: how long, by predicted times. Plain numbers, tested on the
// host.
#pragma once

#include <functional>

#include "cuda/schedule/segments.h"

namespace deltic::gpu::schedule {

// CTAs of the chain forward where all would have an SM and memory is the bound: more of them only
// hold up the others. Measured per channel, 64 states of 128 chunks: 611 us, with 38 of them 622,
// with 48 636, with one to each state 648.
constexpr int64_t kForwardShares = 32;

// What both chains have to do. jobs: states, one per sequence and value head; total: their chunks.
// remembered: the part of the jobs whose gates do not forget a state within a segment, so that
// their transfers are needed. Not known here: a quarter of the heads with gates per head, all
// with gates per channel, where one slow channel is enough, and without gates.
struct ChainWork {
  int jobs, total, longest, keys, values, sms;
  float remembered = 1.f;
  // Whether CTAs of the chain forward may share jobs: per channel, V = 128, sequences of one
  // length, which is what was measured.
  bool shares = true;
};
ChainWork chain_work_of(const Problem& p, int num_sms);

struct ChainTime {
  float transfer, chains;  // with launches and merge; 0: whole sequences
  int columns;             // of a CTA of the chains
  float all() const { return transfer + chains; }
};
// How the chains of whole sequences are dealt: value columns of a CTA, backwards and forwards, and
// how many go forward; fewer of them than there are jobs share these (shares.cuh). By the least
// predicted time; no bit depends on it.
struct ChainDeal {
  int back, forward;
  int64_t forward_ctas;
  float time;
};
ChainDeal deal_chains(ChainCosts c, const ChainWork& w);
// The chains of whole sequences, or of n segments of `chunks`.
ChainTime chain_time(ChainCosts c, const ChainWork& w, int n, int chunks);
// Chunks per segment of the fastest division; 0: whole sequences, also where there is no GPU, or
// numbers are beyond 32 bits: such a call ends before it runs.
int choose_chain_segment(ChainCosts c, const ChainWork& w);
// Of a call: a function of the shape and, for `auto`, of the number of SMs.
int chain_segment(const Problem& p, int num_sms);

// Rounds: the call runs q/k heads after q/k heads, with their value heads and of all sequences,
// each round in the same workspace. Heads share no arithmetic: rounds change no bit.
//
// Wanted is a workspace of at most so many bytes: about what a training step's own results take
// (o, dq, dk, dv, dg of 8192 tokens and 96 heads: 0.94 GiB), so that a step needs twice of it.
constexpr int64_t kRoundBytes = int64_t{1} << 30;
// But not at any price: SMs that a round's chains leave idle are lost, as few heads of a long
// sequence show. Rounds may add so much to the predicted time of a call.
constexpr float kRoundsWorth = 1.05f;
constexpr int64_t kMostRounds = 256;  // three to five launches each
// Predicted for the SMs of an H200, whatever runs: a round is a matter of memory, and the query's
// answer should not depend on the GPU where the segments do not.
constexpr int kRoundSms = 132;

// Q/k heads [first, first + heads) of round `index`; those with one more come first.
struct HeadRange {
  int64_t first, heads;
};
constexpr HeadRange round_at(int64_t heads, int64_t rounds, int64_t index) {
  const int64_t each = heads / rounds, more = heads % rounds;
  return {index * each + (index < more ? index : more), each + (index < more ? 1 : 0)};
}
// The chains of that many q/k heads of the H that all have.
ChainWork chain_work_in(ChainWork all, int64_t H, int64_t heads);
// Predicted microseconds of the chains in rounds, one after the other.
float chain_time_in_rounds(const Problem& p, int num_sms, int segment, int64_t rounds);
// The fewest rounds whose workspace is at most kRoundBytes, among those whose time is allowed; if
// there are none, the smallest workspace among these. bytes: of so many q/k heads. A function of
// the shape, the options and the segments' length.
int64_t choose_rounds(const Problem& p, int segment, const std::function<int64_t(int64_t)>& bytes);

}  // namespace deltic::gpu::schedule
