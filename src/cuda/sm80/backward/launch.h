// The general backward on the GPU: every call.
#pragma once

#include <span>

#include "core/problem.h"

namespace deltic::gpu::backward {

// Null: takes the call; else the sentence why not.
const char* refuse(const Problem& p);
size_t workspace_bytes(const Problem& p);
void run(const Problem& p, std::span<std::byte> workspace, void* stream);

}  // namespace deltic::gpu::backward
