// The CPU backend's implementations, best first, per operation.
#pragma once

#include <string>

#include "core/dispatch.h"

namespace deltic::cpu {
ImplementationList implementations(deltic_op op);

// Bytes that forward keeps with p.save, whatever implementation runs.
size_t saved_bytes(const Problem& p);
std::string features_found();  // instruction sets the machine has
std::string features_used();   // instruction sets implementations here use
}  // namespace deltic::cpu
