// The CPU backend's implementations, best first, per operation.
#pragma once

#include <string>

#include "core/dispatch.h"

namespace deltic::cpu {
ImplementationList implementations(deltic_op op);

std::string features_found();  // instruction sets the machine has
std::string features_used();   // instruction sets implementations here use
}  // namespace deltic::cpu
