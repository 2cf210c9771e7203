// Process-wide defaults: threads, checked mode, the log.
#pragma once

#include <cstdint>
#include <string>

namespace deltic {
int default_threads();
int32_t checked_setting();             // 0, 1, or -1: DELTIC_CHECKED is neither
bool default_checked(const char* op);  // fails in the name of `op` on a wrong DELTIC_CHECKED
int32_t log_setting();                 // 0, 1: dispatch, or -1: DELTIC_LOG is something else
bool logs_dispatch(const char* op);    // likewise on a wrong DELTIC_LOG
void log_line(const std::string& line);
}  // namespace deltic
