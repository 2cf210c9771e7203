// How a CPU call is divided among threads: plain data, from shapes and lengths.
#pragma once

#include "core/problem.h"

namespace deltic::cpu {

// About what a forward pass takes on one core: 1.4 us for a token and head of 128 x 128 measured
// with AVX-512, 0.5 us of 64 x 64.
double forward_ns(const Problem& p);

// Threads of a building block, which is a piece of a chunk: 3 to 9 us at C = K = 64, `times` as
// much.
int block_threads(const Problem& p, int64_t heads, double times = 1);

struct ForwardPlan {
  int threads;    // of the parallel region
  int64_t group;  // tasks (sequence, value head) that are carried at once in rounds
  int64_t block;  // chunks (of that many tokens) of a task that one round carries
};
// From shapes alone, as the workspace query has no lengths. `panels`: pieces of one task's columns;
// `chunk`: tokens that are carried at once.
ForwardPlan forward_plan(const Problem& p, int64_t panels, int64_t chunk);

// Heads that a whole task may carry side by side, chunk by chunk: their rows are neighbours in
// memory, and what the hardware fetches beside a row is the next head's. Their states (bytes each)
// stay in L2, and the pages of a chunk's `tokens` rows in the first TLB: 4 tensors of 16 rows are
// 64 pages, for 8 heads each; of longer chunks the next head does not find them there.
int64_t most_heads_at_once(int64_t heads, int64_t state_bytes, int64_t tokens);

struct TaskOrder {
  bool is_balanced;       // whole tasks keep all threads busy; else rounds
  int64_t heads_at_once;  // of a whole task: `most` or less, for the balance
};
// Sequences by falling length into order[N]; `heads` each. Decides between whole tasks for each
// thread and threads that share a task.
TaskOrder order_tasks(const Problem& p, int threads, int64_t heads, int64_t most, int64_t* order,
                      int64_t* loads);

// Products of small gates run into denormals, which cost a hundred cycles each and carry nothing
// here: flushed to zero for the time of a call, in each of its threads.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

}  // namespace deltic::cpu
