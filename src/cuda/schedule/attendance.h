// Who takes part in a launch whose CTAs wait for one another, when any number of them may start
// late: a word for each CTA that is decided once. Pure functions, for host and device.
//
// A CTA that starts writes kPresent into its own word; when the others have waited long enough for
// it, one of them writes kAbsent there instead, and it leaves at once if it starts after that. Both
// are a compare-and-swap from 0, so a word never changes again, and all who look at the table see
// the same CTAs when no word is 0. They are numbered in the order of the grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/schedule/order.cuh"
#include "cuda/schedule/roles.h"

namespace deltic::gpu::schedule {

constexpr uint32_t kUndecided = 0, kPresent = 1, kAbsent = 2;

// The plan's work with the CTAs that are present, and the plan for them.
__host__ __device__ inline Work work_of(const Plan& plan, int states, int rows, int present) {
  return {plan.total, plan.longest, states, rows, present, plan.shortest, plan.short_jobs};
}
__host__ __device__ inline void set_roles(Plan& plan, const Split& split) {
  const int steps = steps_of(plan.total, plan.longest, split.roles.carriers);
  plan.carriers = split.roles.carriers, plan.parts = split.roles.parts;
  plan.steps = steps > 1 ? steps : 1, plan.time_us = split.time;
}

// Microseconds to wait for those that are not there. Work that takes time_us on all CTAs takes
// time_us * ctas / present on these: waiting gains at most the difference, and who waits no longer
// than that loses at most as much again. Never less than the starts of one launch lie apart.
constexpr float kDoorUs = 16.f;
__host__ __device__ inline float longest_wait(float time_us, int ctas, int present) {
  const float gain = time_us * float(ctas - present) / float(present);
  return gain > kDoorUs ? gain : kDoorUs;
}

// A launch with fewer CTAs than its roles need waits and holds SMs meanwhile, so launches could
// wait for one another: each of as many as there are SMs has one. No GPU of compute capability 9.0
// has more than kMostGrids launches under way, so with more SMs one of them always has two. With
// fewer SMs (a green context, a share of MPS) all CTAs have to start together, or none.
constexpr int kMostGrids = 128;
inline bool may_start_apart(int num_sms) { return num_sms > kMostGrids; }

}  // namespace deltic::gpu::schedule
