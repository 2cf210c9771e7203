// Long sequences in segments: how many, by predicted times. A function of the shape and, for
// `auto`, of the number of SMs; plain numbers, tested on the host.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/schedule/roles.h"

namespace deltic::gpu::schedule {

constexpr int kMaxSegments = 64;       // per sequence: bounds the workspace
constexpr int kMinSegmentChunks = 32;  // of `by length`

// A carrier and a preparer; a transfer has two states to carry. No green context of a Hopper GPU is
// smaller than two SMs. Which implementation runs does not depend on it: the others' bits differ.
constexpr int kFewestSms = 2, kFewestSmsSplit = 3;

GateKind kind_of(const Problem& p);
inline int64_t chunks_in(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

// The call's work in whole sequences. p.N > 0.
Work work_of(const Problem& p, int num_sms);

int changes_of_state(const Work& w, const Roles& roles);
// The longest sequence in n segments, and as much of the others; 0: whole.
inline int segment_of(int longest, int n) { return n > 1 ? (longest + n - 1) / n : 0; }
inline int most_segments(int longest) {
  return longest / 4 < kMaxSegments ? longest / 4 : kMaxSegments;
}
// Whole sequences in n segments of `chunks`.
Work in_segments(Work w, int n, int chunks);
// Predicted microseconds. w: of whole sequences; keys: rows of M. The transfers' launch and merge;
// all of it.
float transfer_time(Costs c, const Work& w, int keys, int n, int chunks);
float time_of_segments(Costs c, const Work& w, int keys, int n, int chunks);
// Chunks per segment of the fastest division, the one with the fewest segments of these.
int choose_segment(Costs c, const Work& w, int keys);

// Chunks per segment of a call; 0: sequences stay whole. A given length is taken as longer where a
// sequence of T tokens would have more than kMaxSegments.
int split_chunks(const Problem& p, int num_sms);

}  // namespace deltic::gpu::schedule
