// The entries of decode's kernels.
#pragma once

#include "core/dispatch.h"

namespace deltic::gpu::decode {

// cuda.decode: one or a few tokens per sequence at the speed at which states can be read and
// written.
const Implementation& implementation();
// cuda.drafts: up to 16 tokens at once from states that are not written, with a record or without.
// Runs only when named.
const Implementation& drafts();

}  // namespace deltic::gpu::decode
