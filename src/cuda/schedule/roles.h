// How many CTAs of a launch carry states and how many prepare packets for them. Pure functions of
// the chunk counts and the number of CTAs, for the host and for the planning kernel.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda/schedule/costs.h"

namespace deltic::gpu::schedule {

__host__ __device__ inline int steps_of(int total, int longest, int carriers) {
  const int even = (total + carriers - 1) / carriers;
  return even > longest ? even : longest;
}
struct Roles {
  int carriers, parts;  // as in Plan
};
// What is to be divided: chunks of all jobs, of the longest, states of a carrier (transfer: 2),
// rows of a state (num_rows), CTAs; chunks of the shortest job, jobs that are about as short.
struct Work {
  int total, longest, states, rows, ctas;
  int shortest = 1, short_jobs = 0;
  bool operator==(const Work&) const = default;
  __host__ __device__ int group(int parts) const { return states * parts; }
  __host__ __device__ int most_parts() const { return rows > kWidth / 2 ? 2 : 1; }
  // One CTA at least prepares.
  __host__ __device__ int most_carriers(int parts) const { return (ctas - 1) / group(parts); }
};
__host__ __device__ inline float step_time(Costs c, const Work& w, Roles r) {
  return r.parts == w.most_parts() ? c.carry_half : c.carry;
}
__host__ __device__ inline float carry_time(Costs c, const Work& w, Roles r) {
  // A carrier whose jobs are the shortest changes them most often.
  const int steps = steps_of(w.total, w.longest, r.carriers), many = steps / w.shortest;
  return step_time(c, w, r) * float(steps) +
         c.part * float(many < w.short_jobs ? many : w.short_jobs);
}
__host__ __device__ inline float prepare_time(Costs c, const Work& w, Roles r) {
  return c.prepare * float(w.total) / float(w.ctas - w.group(r.parts) * r.carriers);
}
// Time of a split of the CTAs, for choosing: the slower of the two roles.
__host__ __device__ inline float split_time(Costs c, const Work& w, Roles r) {
  if (r.carriers < 1 || r.carriers > w.most_carriers(r.parts) || r.parts > w.most_parts())
    return INFINITY;
  const float carry = carry_time(c, w, r), prepare = prepare_time(c, w, r);
  return carry > prepare ? carry : prepare;
}

struct Split {
  Roles roles;
  float time;  // split_time() of these
};
// The best split: of the fastest ones that with the fewest carriers, whole states first. The
// planning kernel tries all of them, a thread for each.
Split choose_split(Costs c, const Work& w);

// The split that is taken for the best one. An odd number of CTAs that carry leaves a carrier and a
// preparer on one pair of SMs; where costs say that this matters, one carrier less or more, if that
// is not to take an eighth longer (with few CTAs one is much).
__host__ __device__ inline Split in_pairs(Costs c, const Work& w, Split best) {
  const Roles r = best.roles;
  if (!c.in_pairs || r.carriers == 1 || w.group(r.parts) * r.carriers % 2 == 0) return best;
  const Roles less = {r.carriers - 1, r.parts}, more = {r.carriers + 1, r.parts};
  const float a = split_time(c, w, less), b = split_time(c, w, more);
  const Split even = a <= b ? Split{less, a} : Split{more, b};
  return even.time < 1.125f * best.time ? even : best;
}

}  // namespace deltic::gpu::schedule
