// The plain implementation of every operation: general, threaded, portable; last in every list.
#pragma once

#include "core/dispatch.h"

namespace deltic::cpu {
const Implementation& plain(deltic_op op);
}
