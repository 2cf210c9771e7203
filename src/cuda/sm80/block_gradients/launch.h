// The gradients of the building blocks on the GPU: cumsum, gate, l2norm, kkt, scores, inverse, wy.
#pragma once

#include <span>

#include "core/problem.h"

namespace deltic::gpu::block_gradients {

size_t workspace_bytes(const Problem& p);
void run(const Problem& p, std::span<std::byte> workspace, void* stream);

}  // namespace deltic::gpu::block_gradients
