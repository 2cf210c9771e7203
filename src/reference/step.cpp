// A step: the convolution, the recurrence over its rows, and the norm of what that leaves.
#include "core/step.h"

#include "core/sizes.h"
#include "reference/operations.h"

namespace deltic::reference {

size_t step_bytes(const Problem& p) {
  const StepProblem& s = *p.step;
  size_t most = std::max(conv_bytes(s.conv), recurrence_bytes(s.decode));
  if (s.has_norm) most = std::max(most, norm_bytes(s.norm));
  return static_cast<size_t>(checked_sum(rows_bytes(s), most));
}

void run_step(const Problem& p, std::byte* workspace) {
  StepProblem& s = *p.step;
  lay_rows(s, workspace);
  std::byte* const rest = workspace + rows_bytes(s);
  run_conv(s.conv, rest);
  run_recurrence(s.decode, rest);
  if (s.has_norm) run_norm(s.norm, rest);
}

}  // namespace deltic::reference
