// The best split of a launch's CTAs, found where the times of the two roles meet.
#include "cuda/schedule/roles.h"

#include <algorithm>

namespace deltic::gpu::schedule {
namespace {

// Among splits with so many parts. More carriers have no more steps each, and leave fewer
// preparers: carry_time() never rises with them and prepare_time() never falls, rounded or not. So
// the best stands where the slower role changes, on one of the two sides.
Split choose_carriers(Costs c, const Work& w, int parts) {
  const int most = w.most_carriers(parts);
  if (most < 1) return {{1, parts}, INFINITY};
  const auto carry = [&](int n) { return carry_time(c, w, {n, parts}); };
  const auto prepare = [&](int n) { return prepare_time(c, w, {n, parts}); };
  // The first number whose carriers are not the slower ones: by the formulas without rounding and
  // changes of jobs, of even steps and of those of the longest job; then to where it is.
  const double step = step_time(c, w, {1, parts}), group = w.group(parts);
  const double even = step * w.ctas / (c.prepare + step * group);
  const double whole = (w.ctas - double(c.prepare) * w.total / (step * w.longest)) / group;
  int meet = int(std::clamp(std::max(even, whole), 1.0, double(most)));
  while (meet > 1 && carry(meet - 1) <= prepare(meet - 1)) --meet;
  while (meet <= most && carry(meet) > prepare(meet)) ++meet;
  Split best = {{meet, parts}, meet <= most ? prepare(meet) : INFINITY};
  if (meet == 1) return best;
  // One less, or the fewest that need no more time.
  const float time = carry(meet - 1);
  if (time > best.time) return best;
  const int steps = std::max(steps_of(w.total, w.longest, meet - 1), 1);
  int fewest = std::max((w.total + steps - 1) / steps, 1);
  while (fewest > 1 && carry(fewest - 1) == time) --fewest;
  return {{fewest, parts}, time};
}

}  // namespace

Split choose_split(Costs c, const Work& w) {
  Split best = {{1, 1}, split_time(c, w, {1, 1})};
  for (int parts = 1; parts <= w.most_parts(); ++parts) {
    const Split split = choose_carriers(c, w, parts);
    if (split.time < best.time || (parts == 1 && split.time == best.time)) best = split;
  }
  return best;
}

}  // namespace deltic::gpu::schedule
