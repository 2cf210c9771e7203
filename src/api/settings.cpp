// Process-wide defaults and their C functions.
#include "api/settings.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "api/guard.h"
#include "core/error.h"

namespace deltic {
namespace {
std::atomic<int> g_threads{0};   // 0: OpenMP's default
std::atomic<int> g_checked{-1};  // -1: DELTIC_CHECKED
std::mutex g_log_mutex;          // orders lines, and a change of the callback with them
std::atomic<deltic_log_fn> g_log{nullptr};
void* g_log_user = nullptr;

// A forked child has none of its parent's OpenMP threads, but their runtime believes that it has:
// a parallel region would wait for them forever.
std::atomic<bool> g_is_forked{false};
[[maybe_unused]] const int g_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { g_is_forked = true; });
}  // namespace

int default_threads() {
  const int n = g_threads.load();
  return is_forked_child() ? 1 : n > 0 ? n : omp_get_max_threads();
}

bool is_forked_child() { return g_is_forked.load(); }

int32_t checked_setting() {
  const int on = g_checked.load();
  if (on >= 0) return on;
  const char* text = std::getenv("DELTIC_CHECKED");
  if (text == nullptr || text[0] == '\0' || std::strcmp(text, "0") == 0) return 0;
  return std::strcmp(text, "1") == 0 ? 1 : -1;
}

bool default_checked(const char* op) {
  const int32_t on = checked_setting();
  if (on < 0) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": DELTIC_CHECKED: expected 0 or 1, got ",
         std::getenv("DELTIC_CHECKED"));
  }
  return on == 1;
}

bool logs_dispatch(const char* op) {
  if (g_log.load() != nullptr) return true;
  const char* text = std::getenv("DELTIC_LOG");
  if (text == nullptr || text[0] == '\0') return false;
  if (std::strcmp(text, "dispatch") != 0) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": DELTIC_LOG: expected dispatch, got ", text);
  }
  return true;
}

void log_line(const std::string& line) {
  const std::lock_guard<std::mutex> lock(g_log_mutex);
  const deltic_log_fn fn = g_log.load();
  if (fn != nullptr) {
    fn(g_log_user, line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
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
    const std::lock_guard<std::mutex> lock(g_log_mutex);
    g_log_user = user;
    g_log = fn;
  });
}
