// Process-wide defaults: threads, checked mode, the log.
#pragma once

#include <cstdint>
#include <string>

namespace deltic {

// Our variables of the environment; null: not set. Found in one pass, where getenv takes 0.1 us of
// a Xeon for each among 90: a call makes one, and its questions below are answered from that.
struct Environment {
  const char *checked = nullptr, *impl = nullptr, *log = nullptr;
};
Environment environment();
class EnvironmentOfCall {
 public:
  EnvironmentOfCall();
  ~EnvironmentOfCall();
  EnvironmentOfCall(const EnvironmentOfCall&) = delete;
  EnvironmentOfCall& operator=(const EnvironmentOfCall&) = delete;

 private:
  const Environment found_;
  const Environment* const outer_;  // of a call that a log's callback makes
};

int default_threads();
int32_t checked_setting();             // 0, 1, or -1: DELTIC_CHECKED is neither
bool default_checked(const char* op);  // fails in the name of `op` on a wrong DELTIC_CHECKED
int32_t log_setting();                 // 0, 1: dispatch, or -1: DELTIC_LOG is something else
bool logs_dispatch(const char* op);    // likewise on a wrong DELTIC_LOG
void log_line(const std::string& line);
}  // namespace deltic
