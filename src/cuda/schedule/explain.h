// What the schedule decided for a call, and what else there was, in words: `deltic explain`.
#pragma once

#include <vector>

#include "core/dispatch.h"

namespace deltic::gpu::schedule {

// Whole sequences, segments by powers of two, and what is chosen, that first. Of a call that the
// forward takes; empty for one without tokens, and where there are too few SMs for it.
std::vector<WorkDivision> explain(const Problem& p, int num_sms);
// Of the backward's chains: their times alone, those of what is chosen in its rounds, which have a
// workspace of so many bytes.
std::vector<WorkDivision> explain_chains(const Problem& p, int num_sms, int64_t rounds,
                                         int64_t round_bytes);

}  // namespace deltic::gpu::schedule
