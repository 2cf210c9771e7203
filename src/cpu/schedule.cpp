// How a CPU call is divided among threads.
#include "cpu/schedule.h"

#include <algorithm>
#include <cmath>

#include "cpu/team.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace deltic::cpu {

double forward_ns(const Problem& p) {
  // Sequences without tokens copy their states.
  const double tokens = std::max(token_heads(p), static_cast<double>(p.N * p.HV));
  return tokens * (150 + 0.08 * static_cast<double>(p.K) * static_cast<double>(p.V));
}

int block_threads(const Problem& p, int64_t heads, double times) {
  const auto C = static_cast<double>(p.chunk), K = static_cast<double>(std::max(p.K, p.V));
  const double chunks = std::ceil(static_cast<double>(p.T) / C) * static_cast<double>(p.B) +
                        static_cast<double>(p.packed ? p.N : 0);
  return useful_threads(p, chunks * static_cast<double>(heads),
                        times * (C * (20 + 0.5 * K) + 0.02 * C * C * K));
}

ForwardPlan forward_plan(const Problem& p, int64_t panels, int64_t chunk) {
  const int64_t tasks = std::max<int64_t>(1, p.N * p.HV);
  const int64_t chunks =
      std::max<int64_t>(1, (p.T + chunk - 1) / chunk);  // of the longest sequence
  ForwardPlan plan;
  const double pieces = static_cast<double>(tasks) * static_cast<double>(std::max(panels, chunks));
  plan.threads = useful_threads(p, pieces, forward_ns(p) / pieces);
  // As many tasks as give every thread a panel to carry.
  plan.group = std::min(tasks, (plan.threads + panels - 1) / panels);
  // Twice as many chunks to prepare as threads, at least 512 tokens per task: the ends of a round
  // stay short, and its operands (2 x 32 x 27 KB in fp32 at K = 128) stay in the L2 of two cores.
  const int64_t per_task = (2 * plan.threads + plan.group - 1) / plan.group;
  plan.block = std::min(chunks, std::max(512 / chunk, per_task));
  return plan;
}

int64_t most_heads_at_once(int64_t heads, int64_t state_bytes, int64_t tokens) {
  constexpr int64_t kRoom = 512 << 10;
  return std::max<int64_t>(1,
                           std::min({heads, int64_t{tokens <= 16 ? 8 : 4}, kRoom / state_bytes}));
}

namespace {

// Longest first, each task to the least loaded thread: is the busiest one near the mean?
bool is_balanced(const Problem& p, int threads, int64_t heads, int64_t at_once,
                 const int64_t* order, int64_t* loads) {
  std::fill(loads, loads + threads, 0);
  int64_t total = 0;
  const auto more = [](int64_t a, int64_t b) { return a > b; };  // min-heap
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t chunks = (length_of(p, order[n]) + p.chunk - 1) / p.chunk;
    if (chunks == 0) break;
    for (int64_t h = 0; h < heads; h += at_once) {
      const int64_t work = chunks * std::min(at_once, heads - h);
      std::pop_heap(loads, loads + threads, more);
      loads[threads - 1] += work;
      std::push_heap(loads, loads + threads, more);
      total += work;
    }
  }
  const int64_t busiest = *std::max_element(loads, loads + threads);
  // Rounds cost about a tenth (barriers, operands through L2 twice).
  return static_cast<double>(busiest) * threads <= 1.1 * static_cast<double>(total) + 0.5;
}

}  // namespace

TaskOrder order_tasks(const Problem& p, int threads, int64_t heads, int64_t most, int64_t* order,
                      int64_t* loads) {
  for (int64_t n = 0; n < p.N; ++n) order[n] = n;
  if (p.packed) {
    std::sort(order, order + p.N, [&](int64_t a, int64_t b) {
      const int64_t x = length_of(p, a), y = length_of(p, b);
      return x != y ? x > y : a < b;
    });
  }
  for (int64_t at_once = most; at_once > 0; at_once /= 2) {
    if (is_balanced(p, threads, heads, at_once, order, loads)) return {true, at_once};
  }
  return {false, 1};
}

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;
#endif

}  // namespace deltic::cpu
