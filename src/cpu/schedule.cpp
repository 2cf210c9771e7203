// How a CPU call is divided among threads.
#include "cpu/schedule.h"

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace deltic::cpu {

ForwardPlan forward_plan(const Problem& p, int64_t panels) {
  const int64_t tasks = std::max<int64_t>(1, p.N * p.HV);
  const int64_t chunks =
      std::max<int64_t>(1, (p.T + p.chunk - 1) / p.chunk);  // of the longest sequence
  ForwardPlan plan;
  // A thread more than there are pieces of work would only wait.
  plan.threads = static_cast<int>(std::min<int64_t>(p.threads, tasks * std::max(panels, chunks)));
  // As many tasks as give every thread a panel to carry.
  plan.group = std::min(tasks, (plan.threads + panels - 1) / panels);
  // Twice as many chunks to prepare as threads, at least 8 per task: the ends of a round stay
  // short, and its operands (2 x 8 x 130 KB in fp32 at K = 128) stay in the L2 of two cores.
  const int64_t per_task = (2 * plan.threads + plan.group - 1) / plan.group;
  plan.block = std::min(chunks, std::max<int64_t>(8, per_task));
  return plan;
}

TaskOrder order_tasks(const Problem& p, int threads, int64_t heads, int64_t* order,
                      int64_t* loads) {
  const auto length = [&](int64_t n) { return p.packed ? p.cu(n + 1) - p.cu(n) : p.T; };
  for (int64_t n = 0; n < p.N; ++n) order[n] = n;
  if (p.packed) {
    std::sort(order, order + p.N, [&](int64_t a, int64_t b) {
      return length(a) != length(b) ? length(a) > length(b) : a < b;
    });
  }
  // Longest first, each task to the least loaded thread: is the busiest one much above the mean?
  std::fill(loads, loads + threads, 0);
  int64_t total = 0;
  const auto more = [](int64_t a, int64_t b) { return a > b; };  // min-heap
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t work = (length(order[n]) + p.chunk - 1) / p.chunk;
    if (work == 0) break;
    for (int64_t h = 0; h < heads; ++h) {
      std::pop_heap(loads, loads + threads, more);
      loads[threads - 1] += work;
      std::push_heap(loads, loads + threads, more);
      total += work;
    }
  }
  const int64_t busiest = *std::max_element(loads, loads + threads);
  // Rounds cost about a tenth (barriers, operands through L2 twice).
  return {static_cast<double>(busiest) * threads <= 1.1 * static_cast<double>(total) + 0.5};
}

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;
#endif

}  // namespace deltic::cpu
