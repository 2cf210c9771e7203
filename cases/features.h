// Features: the rows by which verify counts its cases.
#pragma once

#include <span>

#include "cases/case.h"

namespace deltic::cases {

// A case counts in every row that fits.
struct Feature {
  const char* name;
  bool (*fits)(const Case&);
};
std::span<const Feature> features();

}  // namespace deltic::cases
