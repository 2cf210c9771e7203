// The commands of the program, one file each.
#pragma once

#include <string>
#include <vector>

#include "report.h"

namespace deltic::cli {

struct InfoOptions {
  Common common;
};
int run_info(const InfoOptions& options);

struct ExplainOptions {
  Common common;
  std::string line;
  std::string impl;
  int sms = 0;  // 0: those of the GPU here, else of an H200
};
int run_explain(const ExplainOptions& options);

struct VerifyOptions {
  Common common;
  std::vector<std::string> filters;
  std::vector<std::string> files;  // empty: the built-in cases
  std::string impl;
  long long seed = -1;        // below 0: as the cases say
  bool both_devices = false;  // the CPU before common.device
  bool list = false;
  bool quick = false;       // few_cases() of the built-in ones
  int part = 1, parts = 1;  // of the cases chosen, every parts-th, from the part-th on
};
int run_verify(const VerifyOptions& options);

struct BenchOptions {
  Common common;
  std::vector<std::string> suites;
  std::vector<std::string> filters;
  std::vector<std::string> lines;  // cases on the command line
  std::vector<std::string> files;
  std::string impl;
  std::string anchors;  // a file of times of other libraries, with suites of their rows
  long long seed = -1;
  double seconds = 0;  // per row and side; at least 5 runs in any case; 0: the default
  bool quick = false;  // the suite quick instead of cpu, and less time
  bool list = false;
  std::vector<std::string> compare;  // two files
  std::string threshold = "5%";
};
int run_bench(const BenchOptions& options);
int run_compare(const BenchOptions& options);
// The value of --threshold as a fraction; a UsageError for what is none.
double parse_percent(const std::string& text);

// The program: runs what a command line says and returns the exit status; errors go to stderr.
// is_quick: verify and bench take their quick forms unless --all says otherwise.
int run_program(int argc, char** argv, bool is_quick);

inline constexpr int kDemoSteps = 5;
struct DemoOptions {
  Common common;
  int step = 0;  // 0: all
};
int run_demo(const DemoOptions& options);

}  // namespace deltic::cli
