// Timing that bench and demo share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cases/check.h"
#include "cases/instance.h"
#include "report.h"

namespace deltic::cli {

// One row's times, and what they are compared with.
struct Measurement {
  std::string impl;
  int threads = 1;
  std::vector<double> times, baseline_times;
  double copy_gbps = 0;       // bytes read and written by a copy of the row's size
  double product_gflops = 0;  // of matrix products
  std::string product;        // which instructions
  double flops = 0;           // of the call
  double bytes = 0;           // that it moves
  size_t saved_bytes = 0, workspace_bytes = 0;
  size_t peak_bytes = 0;  // of a step: see Instance::step_bytes
  double call_us = 0;     // on the GPU: the host's time for one call
  std::string checked;    // what was compared with the oracle before
};

struct SuiteRow;
// On the GPU: the row's results against the oracle, then its calls in a graph, on sets of tensors
// by turns so that the cache is cold. Without a passed check there are no times. May throw.
cases::Result measure_on_gpu(const SuiteRow& row, const std::string& named, double seconds,
                             Measurement& m);

// Of a step: its memory into the row's JSON, and the cells of the table under kStepHeader.
inline const std::vector<std::string> kStepHeader = {"row",           "step ms",  "saved MiB",
                                                     "workspace MiB", "peak MiB", "others' peak"};
std::vector<std::string> put_memory(const SuiteRow& row, const Measurement& m, Json& j);

// Fewer and shorter sequences, same widths, heads, dtypes and options: an implementation is never
// chosen by length, so this checks what will be measured without an hour of oracle.
cases::Case reduced(const cases::Case& c);
// The implementation to measure. Throws what explain throws; `unsupported` if none takes the case.
std::string chosen_implementation(const cases::Case& c, const std::string& named,
                                  DeviceType device);

double time_ms(const std::function<void()>& f);
// Of a list in any order, with linear interpolation; NaN if it is empty.
double quantile(std::vector<double> samples, double q);
// The plain recurrence on the tensors of a forward case: our decode, token by token.
std::function<void()> recurrence_call(const cases::Instance& instance, int threads);

}  // namespace deltic::cli
