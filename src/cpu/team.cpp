// The threads of one call: waiting, and what is remembered of it.
#include "cpu/team.h"

#include <chrono>
#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deltic::cpu {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A thread that spins in its runtime is there after 1 to 3 us, a sleeping one after 20 to 60 us:
// with this much to do for each, two threads beat one either way.
constexpr double kFewestNs = 25e3;
// Waking a sleeper costs both sides a few microseconds, and a stage of a chunk takes tens.
constexpr int64_t kSpinNs = 30'000;
// Losses that count: longer than any wake-up, and a good part of the call.
constexpr int64_t kLostNs = 500'000;
constexpr double kLostPart = 0.25;
// Calls stay on one thread for so many times the loss: trying again costs a sixteenth at most.
constexpr int64_t kRest = 16, kLongestRestNs = 2'000'000'000;

std::atomic<int64_t> g_alone_until{0};

// For tests of what threads share: DELTIC_WAKE=1 wakes as many as a call may have, however little
// there is to do and however busy the machine is.
bool wakes_always() {
  static const bool on = [] {
    const char* text = std::getenv("DELTIC_WAKE");
    return text != nullptr && text[0] == '1';
  }();
  return on;
}

void raise(std::atomic<int64_t>& latest, int64_t time) {
  int64_t seen = latest.load(std::memory_order_relaxed);
  while (seen < time && !latest.compare_exchange_weak(seen, time, std::memory_order_relaxed)) {
  }
}

}  // namespace

int useful_threads(const Problem& p, double tasks, double ns_per_task) {
  const double worth = wakes_always() ? tasks : tasks * ns_per_task / kFewestNs;
  const double most = std::min({worth, tasks, static_cast<double>(p.threads)});
  return std::max(1, static_cast<int>(most));
}

void Meeting::wait_for_all(int size) {
  if (size == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const int round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
    return;
  }
  const int64_t until = now_ns() + kSpinNs;
  for (int i = 1; round_.load(std::memory_order_acquire) == round; ++i) {
    pause_core();
    if (i % 64 == 0 && now_ns() > until) {
      round_.wait(round, std::memory_order_acquire);
      return;
    }
  }
}

int TeamClock::limit(int threads) {
  const int64_t until = g_alone_until.load(std::memory_order_relaxed);
  return until != 0 && now_ns() < until && !wakes_always() ? 1 : threads;
}

TeamClock::TeamClock() : begin_(now_ns()), latest_start_(begin_), latest_finish_(begin_) {}
void TeamClock::started() { raise(latest_start_, now_ns()); }
void TeamClock::finished() { raise(latest_finish_, now_ns()); }

// Lost: until the last member had a core, and from the end of the work until the caller saw it.
// Neither depends on how evenly the work was divided.
TeamClock::~TeamClock() {
  const int64_t end = now_ns();
  const int64_t lost = latest_start_.load() - begin_ + end - latest_finish_.load();
  if (lost < kLostNs || static_cast<double>(lost) < kLostPart * static_cast<double>(end - begin_))
    return;
  g_alone_until.store(end + std::min(kRest * lost, kLongestRestNs), std::memory_order_relaxed);
}

}  // namespace deltic::cpu
