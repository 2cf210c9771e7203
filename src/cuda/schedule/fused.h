// Whether a forward with gates per head, or none, runs in fused CTAs, each of which prepares and
// carries whole jobs alone, or in roles: by predicted times, a function of the shape and of the
// number of SMs. Both have the same bits.
#pragma once

#include "core/problem.h"
#include "cuda/schedule/segments.h"

namespace deltic::gpu::schedule {

// Fused CTAs are taken where they are predicted to need less than this part of the roles' time.
constexpr float kFusedGain = .98f;
// And where jobs are this part of the SMs at least. Fewer leave SMs idle that roles use: 96 jobs on
// 132 SMs took 1.2 times as long, 64 took 1.2 to 1.7 times.
constexpr float kFusedShare = .9f;
// A job for each CTA, of so many chunks or more: both took as long (0.99 and 1.00 of it), and two
// machines differ by more. In roles.
constexpr int kFusedLongest = 128;

// The call's work by its mean length: the lengths of packed sequences are not known here, and both
// times are those of equal ones.
Work equal_work(const Problem& p, int num_sms);
// The CTA with the most of jobs of one length, which CTAs draw one by one (tickets.cuh): their
// number, and steps.
struct FusedShare {
  int jobs, steps;
};
FusedShare share_of(const Work& w);
float fused_time(const FusedCosts& c, const Work& w);
float roles_time(const Work& w);

// Whole sequences only: pieces of a few long ones are few, too.
bool fuses(const Problem& p, int num_sms);

}  // namespace deltic::gpu::schedule
