// Timing that bench and demo share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "instance.h"

namespace deltic::cli {

double time_ms(const std::function<void()>& f);
// Of a list in any order, with linear interpolation; NaN if it is empty.
double quantile(std::vector<double> samples, double q);
// The plain recurrence on the tensors of a forward case: our decode, token by token.
std::function<void()> recurrence_call(const cases::Instance& instance, int threads);

}  // namespace deltic::cli
