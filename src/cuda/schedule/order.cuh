// The order of work: who carries and who prepares which chunk. Pure functions of the plan, for host
// and device.
//
// Jobs (piece, value head) stand in a row of `total` chunks. Carrier i owns positions
// [i steps, (i + 1) steps) and needs one packet per step. A job across a border is carried by two
// CTAs one after the other (wrap-around rule): its first chunks at the start of carrier i + 1, its
// last at the end of carrier i, so the parts never overlap in time because no job is longer than
// `steps`; the fp32 state goes over through global memory, which changes no bit.
#pragma once

#include <cuda_runtime.h>

#include "cuda/schedule/costs.h"

namespace deltic::gpu::schedule {

struct Place {  // of one chunk of one job
  int piece, head, chunk;
  int begin, end;   // chunks of the job that this carrier has
  int count;        // chunks of the job
  int first_chunk;  // of all pieces: the first of this one
};
// Who does what; written by the planning kernel for all CTAs of a launch, the same for each of
// them.
struct Plan {
  int total;     // chunks of all jobs; a job is (piece, value head), in this order
  int carriers;  // times group_of() CTAs carry a state; the others prepare
  int parts;     // CTAs that share a state's value columns: 2 have 64 each
  int steps;     // chunks per carrier: carrier i has positions [i steps, (i + 1) steps)
  int num_pieces;
  int padding;    // first token of the T dimension that belongs to no sequence
  int has_empty;  // are there sequences without tokens?
  // For a plan of the same work with fewer CTAs: as in Work, and what roles were chosen by.
  int longest, shortest, short_jobs;
  float time_us;
};

// a / b for 0 <= a / b < 2^22: a third of the instructions of an exact division.
__host__ __device__ inline int divide(int a, int b) {
#ifndef __CUDA_ARCH__
  return a / b;
#else
  int q = int(float(a) * __frcp_rn(float(b)));
  const int r = a - q * b;
  if (r < 0) q--;
  if (r >= b) q++;
  return q;
#endif
}

// table: of chunks before each piece, in shared or global memory.
__host__ __device__ inline Place locate(const Plan& plan, const int* table, int jobs_per_piece,
                                        int position) {
  const int q = divide(position, jobs_per_piece);
  int lo = 0, hi = plan.num_pieces;  // prefix[lo] <= q < prefix[hi]
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (table[mid] <= q)
      lo = mid;
    else
      hi = mid;
  }
  Place p;
  p.piece = lo;
  const int first = table[lo], rel = position - jobs_per_piece * first;
  p.count = table[lo + 1] - first, p.first_chunk = first;
  const int job = divide(rel, p.count), off = rel - job * p.count;
  p.head = job;
  const int start = position - off, border = (divide(start, plan.steps) + 1) * plan.steps;
  const int here = min(p.count, border - start), later = p.count - here;
  if (off < here)
    p.begin = later, p.end = p.count, p.chunk = later + off;
  else
    p.begin = 0, p.end = later, p.chunk = off - here;
  return p;
}

// Packets are prepared step by step, all carriers of a step in turn; the last carrier may have
// fewer steps than the others.
struct StepOf {
  int step, carrier;
};
__host__ __device__ inline StepOf item_at(const Plan& plan, int index) {
  const int full = divide(plan.total, plan.steps), more = plan.total - full * plan.steps;
  const int wide =
      more * (full + 1);  // packets of the steps in which the last carrier is there too
  const bool is_wide = index < wide;
  const int i = is_wide ? index : index - wide, n = is_wide ? full + 1 : full, step = divide(i, n);
  return {is_wide ? step : more + step, i - step * n};
}

// Of `preparers`, each takes every so many-th packet in this order.
__host__ __device__ inline int num_items_of(int total, int preparer, int preparers) {
  return (total - preparer + preparers - 1) / preparers;
}
__host__ __device__ inline int num_positions(const Plan& plan, int carrier) {
  const int left = plan.total - carrier * plan.steps;
  return left < 0 ? 0 : left < plan.steps ? left : plan.steps;
}

}  // namespace deltic::gpu::schedule
