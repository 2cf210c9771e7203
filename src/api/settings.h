// Process-wide defaults: threads, checked mode, the log.
#pragma once

#include <string>

namespace deltic {
int default_threads();
bool default_checked();
bool logs_dispatch();
void log_line(const std::string& line);
}  // namespace deltic
