// Process-wide defaults and their C functions.
#include "api/settings.h"

#include <omp.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "api/guard.h"
#include "api/threads.h"
#include "core/error.h"

extern char** environ;

namespace deltic {
namespace {
thread_local const Environment* t_environment = nullptr;  // of this thread's call

Environment read_environment() {
  constexpr std::string_view kOurs = "DELTIC_";
  Environment found;
  if (environ == nullptr) return found;
  for (char** at = environ; *at != nullptr; ++at) {
    const char* const text = *at;
    // Most differ in the first letter: a call of strncmp for each takes 0.3 us of 90.
    if (text[0] != 'D' || std::strncmp(text, kOurs.data(), kOurs.size()) != 0) continue;
    const std::string_view entry(text + kOurs.size());
    const size_t equal = entry.find('=');
    if (equal == std::string_view::npos) continue;
    const std::string_view name = entry.substr(0, equal);
    const char** const to = name == "CHECKED" ? &found.checked
                            : name == "IMPL"  ? &found.impl
                            : name == "LOG"   ? &found.log
                                              : nullptr;
    // The first of two, as getenv has it.
    if (to != nullptr && *to == nullptr) *to = entry.data() + equal + 1;
  }
  return found;
}

std::atomic<int> g_threads{0};   // 0: OpenMP's default
std::atomic<int> g_checked{-1};  // -1: DELTIC_CHECKED

// The log's callback. No lock is held while it runs: it may call the library, and may wait for a
// thread that does.
struct Log {
  deltic_log_fn fn;
  void* user;
  int inside = 0;  // threads in the callback
};
std::mutex g_log_mutex;
std::condition_variable g_log_left;
std::shared_ptr<Log> g_log;             // null: stderr
std::atomic<bool> g_has_log{false};     // the same, without the lock
thread_local bool t_is_in_log = false;  // this thread logs nothing meanwhile

// Runs the callback; false if there is none.
bool call_log(const char* line) {
  struct Inside {
    std::shared_ptr<Log> log;
    Inside() {
      const std::lock_guard<std::mutex> lock(g_log_mutex);
      log = g_log;
      if (log != nullptr) ++log->inside, t_is_in_log = true;
    }
    ~Inside() {
      if (log == nullptr) return;
      const std::lock_guard<std::mutex> lock(g_log_mutex);
      --log->inside, t_is_in_log = false;
      g_log_left.notify_all();
    }
  };
  const Inside inside;
  if (inside.log == nullptr) return false;
  inside.log->fn(inside.log->user, line);
  return true;
}
}  // namespace

Environment environment() { return t_environment ? *t_environment : read_environment(); }

EnvironmentOfCall::EnvironmentOfCall() : found_(read_environment()), outer_(t_environment) {
  t_environment = &found_;
}
EnvironmentOfCall::~EnvironmentOfCall() { t_environment = outer_; }

int default_threads() {
  const int n = g_threads.load();
  return is_forked_child() ? 1 : n > 0 ? n : omp_get_max_threads();
}

int32_t checked_setting() {
  const int on = g_checked.load();
  if (on >= 0) return on;
  const char* text = environment().checked;
  if (text == nullptr || text[0] == '\0' || std::strcmp(text, "0") == 0) return 0;
  return std::strcmp(text, "1") == 0 ? 1 : -1;
}

bool default_checked(const char* op) {
  const int32_t on = checked_setting();
  if (on < 0) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": DELTIC_CHECKED: expected 0 or 1, got ",
         environment().checked);
  }
  return on == 1;
}

int32_t log_setting() {
  if (g_has_log.load()) return 1;
  const char* text = environment().log;
  if (text == nullptr || text[0] == '\0') return 0;
  return std::strcmp(text, "dispatch") == 0 ? 1 : -1;
}

bool logs_dispatch(const char* op) {
  if (t_is_in_log) return false;
  const int32_t on = log_setting();
  if (on < 0) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": DELTIC_LOG: expected dispatch, got ", environment().log);
  }
  return on == 1;
}

void log_line(const std::string& line) {
  if (call_log(line.c_str())) return;
  // Where the callback was taken away in the middle of a call, nobody asked for the rest of it.
  if (environment().log != nullptr) std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace deltic

using namespace deltic;

deltic_status deltic_set_num_threads(int32_t n) {
  return guard([&] {
    if (n < 0 || n > 4096) {
      fail(DELTIC_INVALID_ARGUMENT, "set_num_threads: n: expected 0 (default) to 4096, got ", n);
    }
    g_threads = n;
  });
}
int32_t deltic_get_num_threads(void) { return default_threads(); }

deltic_status deltic_set_checked(int32_t on) {
  return guard([&] {
    if (on < -1 || on > 1) {
      fail(DELTIC_INVALID_ARGUMENT, "set_checked: on: expected -1 (environment), 0 or 1, got ", on);
    }
    g_checked = on;
  });
}
int32_t deltic_get_checked(void) { return checked_setting(); }

deltic_status deltic_set_log(deltic_log_fn fn, void* user) {
  return guard([&] {
    std::shared_ptr<Log> log;
    if (fn != nullptr) log = std::make_shared<Log>(Log{fn, user});
    std::unique_lock<std::mutex> lock(g_log_mutex);
    std::swap(log, g_log);
    g_has_log = fn != nullptr;
    // In a callback it does not wait: two that did would wait for each other.
    if (log == nullptr || t_is_in_log) return;
    g_log_left.wait(lock, [&] { return log->inside == 0; });
  });
}
