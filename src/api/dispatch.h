// Choosing an implementation: lists per operation and device, names from the call or DELTIC_IMPL.
#pragma once

#include <string>

#include "core/dispatch.h"

namespace deltic {

// The number of implementations of an operation on a device, the oracle last.
int implementation_count(deltic_op op, deltic_device_type device);
const Implementation& implementation_at(deltic_op op, deltic_device_type device, int index);

// The implementation a call names (its option, else DELTIC_IMPL), or null. Unknown names throw.
// called: the operation that the caller knows, where another's implementations run it.
const Implementation* named_implementation(deltic_op op, deltic_device_type device,
                                           const char* option, deltic_op called);
// Of an operation that runs behind another: the option's, if it has one of that name.
const Implementation* named_behind(deltic_op op, deltic_device_type device, const char* option);

// The first that takes the call, or the named one. Throws with every sentence if there is none.
const Implementation& choose(const Problem& p, const Implementation* named);

// Why an implementation does not take a call; null if it does.
const char* refusal(const Implementation& implementation, const Problem& p);

}  // namespace deltic
