// The oracle's operations, and the workspace of each: that of a Scratch without memory.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace deltic::reference {

size_t recurrence_bytes(const Problem& p);
void run_recurrence(const Problem& p, std::byte* workspace);

size_t backward_bytes(const Problem& p);
void run_backward(const Problem& p, std::byte* workspace);

size_t blocks_bytes(const Problem& p);
void run_blocks(const Problem& p, std::byte* workspace);

size_t block_gradients_bytes(const Problem& p);
void run_block_gradients(const Problem& p, std::byte* workspace);

// The gated RMS norm and, with Problem::is_gradient, its gradient.
size_t norm_bytes(const Problem& p);
void run_norm(const Problem& p, std::byte* workspace);

// The convolution and, with Problem::is_gradient, its gradient.
size_t conv_bytes(const Problem& p);
void run_conv(const Problem& p, std::byte* workspace);

// States from slot to slot.
size_t move_bytes(const Problem& p);
void run_move(const Problem& p, std::byte* workspace);

// The recorded updates of accepted tokens.
size_t commit_bytes(const Problem& p);
void run_commit(const Problem& p, std::byte* workspace);

// The parts of a step one after the other, the rows in between in x's dtype: fp64 where x is.
size_t step_bytes(const Problem& p);
void run_step(const Problem& p, std::byte* workspace);

}  // namespace deltic::reference
