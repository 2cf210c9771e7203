// How many threads a call gets: one in a forked child, and no more than the system gives.
#include "api/threads.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>

namespace deltic {
namespace {

// A forked child has none of its parent's OpenMP threads, but their runtime believes that it has:
// a parallel region would wait for them forever.
std::atomic<bool> g_is_forked{false};
[[maybe_unused]] const int g_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { g_is_forked = true; });

struct Trial {
  int wanted;
  int there = 0;  // written by the youngest thread alone, before it creates the next
};

// Counts this thread, creates the next and waits for it: all of them are there at once, as in a
// team. Nothing is allocated but their stacks, which the C library keeps for OpenMP's threads.
void* join_trial(void* given) {
  auto& trial = *static_cast<Trial*>(given);
  pthread_t next;
  const bool is_last = ++trial.there == trial.wanted;
  if (!is_last && pthread_create(&next, nullptr, join_trial, given) == 0) {
    pthread_join(next, nullptr);
  }
  return nullptr;
}

// This one included.
int count_threads(int wanted) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of the caller's runs on them
  Trial trial{wanted};
  join_trial(&trial);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return trial.there;
}

}  // namespace

bool is_forked_child() { return g_is_forked.load(); }

int threads_to_be_had(int wanted) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience{1};  // a trial of n threads costs about n * 20 us
  thread_local int t_most = 1;                  // that were there in a trial
  thread_local Clock::time_point t_refused{};   // when there were fewer than wanted
  if (is_forked_child()) return 1;
  // Inside of another parallel region ours has one thread, the caller's.
  if (wanted <= t_most || omp_in_parallel() != 0) return wanted;
  const Clock::time_point now = Clock::now();
  if (t_refused != Clock::time_point{} && now - t_refused < kPatience) return t_most;
  t_most = count_threads(wanted);
  t_refused = t_most < wanted ? now : Clock::time_point{};
  return t_most;
}

}  // namespace deltic
