// Numbers of a case's inputs: functions of the case and an index, the same on every platform.
#pragma once

#include <cstdint>
#include <vector>

#include "cases/case.h"
#include "cases/scalar.h"

namespace deltic::cases {

// Keys [B,T,H,K] and queries [B,T,H,K], row-major.
std::vector<double> draw_keys(const Case& c, bool normalised);
std::vector<double> draw_queries(const Case& c);
// Element i of beta: the raw value for the sigmoid forms.
double draw_beta(const Case& c, const Random& random, int64_t i);

// Elements of g [B,T,HV] or [B,T,HV,K].
class GateSource {
 public:
  GateSource(const Case& c, std::vector<double> A_log, std::vector<double> dt_bias);
  double log_decay(int64_t i) const;  // what the gate shall be
  double raw(int64_t i) const;        // what the gate form turns into it

 private:
  const Case& c_;
  Random random_, pick_;
  std::vector<double> A_log_, dt_bias_;  // as the call gets them; empty if it does not
  int64_t width_;
};
// Element i of gv [B,T,HV,V].
double draw_value_gate(const Case& c, const Random& random, const Random& pick, int64_t i);

// What the building blocks take that others compute: the cumulative gate, and from it A (inverse:
// below the diagonal, NaN elsewhere) or its inverse (wy), [B,T,HV,W]. Empty where the operation
// takes none.
struct BlockInputs {
  std::vector<double> k, G, a;
};
BlockInputs draw_block_inputs(const Case& c);

}  // namespace deltic::cases
