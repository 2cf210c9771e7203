// Timing that bench and demo share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "instance.h"

namespace deltic::cli {

// One row's times, and what they are compared with.
struct Measurement {
  std::string impl;
  int threads = 1;
  std::vector<double> times, baseline_times;
  double copy_gbps = 0;       // bytes read and written by a copy of the row's size
  double product_gflops = 0;  // of matrix products
  std::string product;        // which instructions
  double bytes = 0;           // that the call moves
  size_t saved_bytes = 0, workspace_bytes = 0;
  double call_us = 0;  // on the GPU: the host's time for one call
};

struct SuiteRow;
// On the GPU: calls in a graph, on sets of tensors by turns so that the cache is cold.
Measurement measure_on_gpu(const SuiteRow& row, const std::string& impl, double seconds);

double time_ms(const std::function<void()>& f);
// Of a list in any order, with linear interpolation; NaN if it is empty.
double quantile(std::vector<double> samples, double q);
// The plain recurrence on the tensors of a forward case: our decode, token by token.
std::function<void()> recurrence_call(const cases::Instance& instance, int threads);

}  // namespace deltic::cli
