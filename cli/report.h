// What the commands share: output to people and to JSON, exit codes, facts about the machine.
#pragma once

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cases/case.h"

namespace deltic::cli {

using Json = nlohmann::ordered_json;

inline constexpr int kExitPass = 0, kExitFail = 1, kExitUsage = 2;

// Options that every command takes.
struct Common {
  std::string json;               // path, "-" for stdout, empty for none
  std::string* answer = nullptr;  // the JSON goes here, and nothing is printed
  int threads = 0;                // 0: the library's default
  DeviceType device = DeviceType::cpu;
};

// A command line that cannot be carried out; main prints it and exits with 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws a std::runtime_error if something that was printed to stdout did not get there: a full
// disk, a pipe whose reader is gone. main calls it after every command.
void flush_output();

// One command's output. People read stdout, or stderr where the JSON goes to stdout.
class Report {
 public:
  Report(const Common& common, const std::string& schema);
  FILE* out() const { return out_; }
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const;
  Json& cases() { return document_["cases"]; }
  Json& summary() { return document_["summary"]; }
  void write() const;      // the JSON, if it was asked for
  void save_part() const;  // what there is of it so far, if it goes to a file

 private:
  std::ofstream open_for_writing(std::ios::openmode mode) const;

  std::string path_;
  std::string* answer_;
  FILE* out_;
  Json document_;
};

// A line on stderr that is rewritten on a terminal, and printed every tenth of the way elsewhere.
class Progress {
 public:
  Progress(std::string verb, size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& what);

 private:
  std::string verb_;
  size_t total_, done_ = 0, last_tenth_ = 0;
  bool is_terminal_;
};

// The JSON in a file that an option names; throws a UsageError in its name, which says what was
// expected, if there is no such file or something else in it.
Json read_json(const std::string& path, const std::string& option, const std::string& expected);

// Columns as wide as their widest cell; the first is set left, the others right.
void print_table(const Report& report, const std::vector<std::vector<std::string>>& rows);

Json machine();                     // facts about the library's build and the machine
std::string fact(const char* key);  // one of them, "unknown" if there is none
Json number_or_null(double x);      // JSON has no infinity
std::string format(const char* format, double x);

// Throws a UsageError unless the device that was asked for is there.
void check_device(const Common& common);
// Throws a UsageError with the library's sentence if a DELTIC_* variable is wrong: once, not for
// every case.
void check_environment();
// Throws a UsageError if no operation has an implementation of that name; an empty name is fine.
void check_impl_name(const std::string& impl);
// A case for the command line, with a wrong line turned into a UsageError.
cases::Case parse_argument(const std::string& line);

}  // namespace deltic::cli
