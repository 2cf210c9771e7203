// The oracle: every operation in fp64, written like its equations, and sharing no arithmetic with
// the implementations it judges. Runs only when named.
#pragma once

#include "core/dispatch.h"

namespace deltic::reference {
const Implementation& implementation(deltic_op op);
}
