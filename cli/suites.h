// The suites of `deltic bench`: rows with a name, a case and what they are measured against.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cases/case.h"

namespace deltic::cli {

enum class Baseline {
  recurrence,  // our decode on the same tensors, token by token, same threads
  copy,        // a copy that moves as many bytes, same threads
  one_thread,  // the same call on one thread
  forward,     // of a backward row: the forward call that keeps what it starts from
  anchor,      // another library's time on the same GPU, from a file
  ours,        // another case of ours, measured in the same run
};
const char* name_of(Baseline b);

// A time of somebody else's.
struct Anchor {
  std::string name;  // whose
  double ms = 0;
  double peak_bytes = 0;  // of a step: memory beyond the inputs; 0: not known
};

struct SuiteRow {
  std::string suite;
  std::string label;
  cases::Case spec;
  Baseline baseline = Baseline::recurrence;
  int threads = 0;  // 0: as the command line says
  DeviceType device = DeviceType::cpu;
  Anchor anchor{};                     // of Baseline::anchor
  std::vector<Anchor> more{};          // further times for the result
  std::optional<cases::Case> other{};  // of Baseline::ours
  std::string other_name{};            // what it is
  bool is_step = false;                // of a backward case: forward and backward in one time
};

std::vector<SuiteRow> all_suites();
// Rows of a file of anchors that are no case of a suite, and why.
struct LeftOut {
  std::string op;  // in the file's words
  int rows = 0;
  std::string reason;
};
struct AnchorSuites {
  std::vector<SuiteRow> rows;
  std::vector<LeftOut> left_out;
};
// Suites of the rows that a file of anchors has (bench/anchors/h200.json), for a GPU. Throws
// UsageError.
AnchorSuites anchor_suites(const std::string& path);
Baseline default_baseline(const cases::Case& c);

}  // namespace deltic::cli
