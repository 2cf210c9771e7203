// Roles and order of work. Pure functions of the chunk counts and the number of CTAs.
//
// Jobs (sequence, value head) stand in a row of `total` chunks. Carrier i owns positions
// [i steps, (i + 1) steps) and needs one packet per step. A job across a border is carried by two
// CTAs one after the other (wrap-around rule): its first chunks at the start of carrier i + 1, its
// last at the end of carrier i, so the parts never overlap in time because no job is longer than
// `steps`; the fp32 state goes over through global memory, which changes no bit.
#pragma once
#include "params.h"
#include "ptx.cuh"

namespace deltic::gpu {

struct Costs {  // microseconds of one SM per chunk
  float carry, prepare;
};
// For sharing out the CTAs of one launch: not what a packet costs alone, but what gave the best
// times at 64 and 96 heads (a ring of eight packets per carrier keeps fewer preparers busy when
// carriers are few).
__host__ __device__ inline Costs costs_of(Gate gate) {
  return gate == Gate::kChannel ? Costs{2.3f, 3.8f} : Costs{2.2f, 2.0f};
}
// As measured, for choosing segments.
__host__ __device__ inline Costs measured_costs(Gate gate) {
  return gate == Gate::kChannel ? Costs{2.2f, 5.2f} : Costs{2.2f, 2.4f};
}

__host__ __device__ inline int steps_of(int total, int longest, int carriers) {
  const int even = (total + carriers - 1) / carriers;
  return even > longest ? even : longest;
}
// Time of a split of the CTAs, for choosing: the slower of the two roles.
__host__ __device__ inline float split_time(Costs c, int total, int longest, int carriers,
                                            int group, int ctas) {
  const float carry = c.carry * steps_of(total, longest, carriers);
  const float prepare = c.prepare * total / (ctas - group * carriers);
  return carry > prepare ? carry : prepare;
}
// Fewest carriers among the best splits.
__host__ __device__ inline int choose_carriers(Costs c, int total, int longest, int group,
                                               int ctas) {
  int best = 1;
  float time = split_time(c, total, longest, 1, group, ctas);
  for (int n = 2; group * n < ctas; n++) {
    const float t = split_time(c, total, longest, n, group, ctas);
    if (t < time) time = t, best = n;
  }
  return best;
}

// a / b for 0 <= a / b < 2^22: a third of the instructions of an exact division.
__device__ inline int divide(int a, int b) {
  int q = int(float(a) * __frcp_rn(float(b)));
  const int r = a - q * b;
  if (r < 0) q--;
  if (r >= b) q++;
  return q;
}

struct Place {  // of one chunk of one job
  int seq, head, chunk;
  int begin, end;  // chunks of the job that this carrier has
  int count;       // chunks of the job
};
// table: of chunks before each sequence, in shared or global memory.
__device__ inline Place locate(const Plan& plan, const int* table, int jobs_per_seq,
                               int position) {
  const int q = divide(position, jobs_per_seq);
  int lo = 0, hi = plan.num_seqs;  // prefix[lo] <= q < prefix[hi]
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (table[mid] <= q)
      lo = mid;
    else
      hi = mid;
  }
  Place p;
  p.seq = lo;
  const int first = table[lo], rel = position - jobs_per_seq * first;
  p.count = table[lo + 1] - first;
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

__device__ inline Place place_of(const Params& params, const Plan& plan, int position) {
  return locate(plan, params.chunk_prefix, opaque(params.num_value_heads), position);
}

// Packets are prepared step by step, all carriers of a step in turn; the last carrier may have
// fewer steps than the others.
struct StepOf {
  int step, carrier;
};
__device__ inline StepOf item_at(const Plan& plan, int index) {
  const int full = divide(plan.total, plan.steps), more = plan.total - full * plan.steps;
  const int wide =
      more * (full + 1);  // packets of the steps in which the last carrier is there too
  const bool is_wide = index < wide;
  const int i = is_wide ? index : index - wide, n = is_wide ? full + 1 : full, step = divide(i, n);
  return {is_wide ? step : more + step, i - step * n};
}

// One CTA: chunk counts, roles, and flags back to zero.
template <int kThreads>
__global__ void make_plan(const __grid_constant__ Params params, Costs costs, int ctas) {
  __shared__ int s_sum[kThreads], s_longest;
  __shared__ float s_time[kThreads];
  const int tid = threadIdx.x, n = params.num_seqs;
  grid_wait();     // nobody reads the workspace any more
  grid_release();  // the launch of the kernel is under way meanwhile
  for (int i = tid; i < flag_words(ctas) / 4; i += kThreads)
    reinterpret_cast<uint4*>(params.flags)[i] = uint4{0, 0, 0, 0};
  // Thread t sums the sequences [t per, (t + 1) per).
  const int per = (n + kThreads - 1) / kThreads;
  if (tid == 0) s_longest = 0;
  __syncthreads();
  int sum = 0, longest = 0;
  auto chunks = [&](int i) {
    return (params.cu_seqlens[i + 1] - params.cu_seqlens[i] + kChunk - 1) / kChunk;
  };
  for (int i = tid * per; i < min(n, (tid + 1) * per); i++) {
    const int c = chunks(i);
    sum += c, longest = max(longest, c);
  }
  s_sum[tid] = sum;
  atomicMax(&s_longest, longest);
  __syncthreads();
  for (int d = 1; d < kThreads; d *= 2) {  // inclusive scan
    const int x = tid >= d ? s_sum[tid - d] : 0;
    __syncthreads();
    s_sum[tid] += x;
    __syncthreads();
  }
  int before = s_sum[tid] - sum;
  for (int i = tid * per; i < min(n, (tid + 1) * per); i++) {
    params.chunk_prefix[i] = before;
    before += chunks(i);
  }
  const int total = s_sum[kThreads - 1] * params.num_value_heads, group = group_of(params);
  s_time[tid] = tid >= 1 && group * tid < ctas
                    ? split_time(costs, total, s_longest, tid, group, ctas)
                    : INFINITY;
  __syncthreads();
  if (tid == 0) {
    params.chunk_prefix[n] = s_sum[kThreads - 1];
    int best = 1;
    for (int i = 2; i < ctas; i++)
      if (s_time[i] < s_time[best]) best = i;
    *params.plan = {total, best, steps_of(total, s_longest, best), n};
  }
}

}  // namespace deltic::gpu
