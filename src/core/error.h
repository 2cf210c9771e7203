// Errors inside the library: thrown, turned into status codes at the C ABI.
#pragma once

#include <exception>
#include <sstream>
#include <string>

#include "deltic/deltic.h"

namespace deltic {

class Failure : public std::exception {
 public:
  Failure(deltic_status status, std::string message)
      : status_(status), message_(std::move(message)) {}
  deltic_status status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  deltic_status status_;
  std::string message_;
};

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(deltic_status status, const Parts&... parts) {
  throw Failure(status, cat(parts...));
}

}  // namespace deltic
