// The oracle: fp64 recurrence and fp64 building blocks, written like the equations. Runs only when
// named.
#pragma once

#include "core/dispatch.h"

namespace deltic::reference {
const Implementation& implementation(deltic_op op);
}
