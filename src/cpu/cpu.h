// The CPU backend's implementations, best first, per operation.
#pragma once

#include <string>

#include "core/dispatch.h"
#include "core/saved.h"

namespace deltic::cpu {
ImplementationList implementations(deltic_op op);

// Of what forward keeps with `save`, whatever implementation runs.
SavedSizes saved_sizes(const Problem& p, deltic_save save);
std::string features_found();  // instruction sets the machine has
std::string features_used();   // instruction sets implementations here use
}  // namespace deltic::cpu
