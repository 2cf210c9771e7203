// The threads of one call: how many are worth waking, what they share, and how they wait.
//
// OpenMP gives the threads; its own loops and barriers are not used. A thread of libgomp that waits
// spins for about 10 ms before it sleeps. On a machine whose cores are all taken that keeps a core
// from the very thread it waits for, and a call of 2 us took 30 ms. So threads here take items one
// by one (one that lost its core holds up a single item), wait asleep after a short spin, and a
// call that lost time to other processes is followed by a while of calls on one thread.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/problem.h"

namespace deltic::cpu {

// Threads for `tasks` pieces of work of about `ns_per_task` on one core, at most p.threads: each
// gets enough to be worth waking.
int useful_threads(const Problem& p, double tasks, double ns_per_task);
// Tokens of a call times its value heads.
inline double token_heads(const Problem& p) {
  return static_cast<double>(p.B) * static_cast<double>(p.T) * static_cast<double>(p.HV);
}

// Where members of a team meet, and the item that is next.
class Meeting {
 public:
  // The first of `count` items that are the caller's now.
  int64_t next(int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }
  // Everything that any of `size` members wrote before is seen by all of them after. Items start
  // from 0 again.
  void wait_for_all(int size);

 private:
  std::atomic<int64_t> next_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

// One thread of a team.
struct Member {
  int index, size;
  Meeting& meeting;

  // body(i) for this member's part of i < n.
  template <class Body>
  void for_own(int64_t n, const Body& body) const {
    for (int64_t i = index; i < n; i += size) body(i);
  }
  // body(i) for i < n, shared by the team; the members meet at the end.
  template <class Body>
  void for_each(int64_t n, const Body& body) const {
    for_runs(n, 1, body);
  }
  // The same for items whose results are neighbours in memory: a member takes `count` of them, in
  // order.
  template <class Body>
  void for_runs(int64_t n, int64_t count, const Body& body) const {
    if (size == 1) count = n;
    for (int64_t first = meeting.next(count); first < n; first = meeting.next(count)) {
      for (int64_t i = first; i < std::min(n, first + count); ++i) body(i);
    }
    meeting.wait_for_all(size);
  }
};

// What became of a team's time.
class TeamClock {
 public:
  // `threads`, or 1 for a while after a team that lost time.
  static int limit(int threads);
  TeamClock();
  void started();   // by every member, first
  void finished();  // by every member, when its work is done
  ~TeamClock();     // after the last: remembers what was lost

 private:
  int64_t begin_;
  std::atomic<int64_t> latest_start_, latest_finish_;
};

// body(member) on a team of at most `threads`. One thread opens no parallel region.
template <class Body>
void run_team(int threads, const Body& body) {
  Meeting meeting;
  threads = threads > 1 ? TeamClock::limit(threads) : 1;
  if (threads == 1) {
    body(Member{0, 1, meeting});
    return;
  }
  TeamClock clock;
#pragma omp parallel num_threads(threads)
  {
    clock.started();
    const Member member{omp_get_thread_num(), omp_get_num_threads(), meeting};
    body(member);
    clock.finished();
    // Asleep here rather than spinning in the region's own barrier.
    meeting.wait_for_all(member.size);
  }
}

}  // namespace deltic::cpu
