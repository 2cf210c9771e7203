// Everything that can be wrong with a call, found before anything is written.
#pragma once

#include <span>

#include "core/finding.h"
#include "core/problem.h"

namespace deltic {

const char* name_of(deltic_op op);
// How the arguments of a part of a step begin: `conv.`, `decode.` or `norm.`.
const char* part_prefix(deltic_op op);
constexpr bool is_block(deltic_op op) {
  return (op >= DELTIC_CUMSUM && op <= DELTIC_WY) || op == DELTIC_SCORES_INVERSE ||
         op == DELTIC_RMSNORM;
}

// What the caller knows besides the call itself.
class StepMemory;
struct CheckContext {
  bool query = false;          // data pointers may be null, values are not read
  bool allow_f64 = false;      // the oracle was named
  int32_t threads = 1;         // default number of threads
  bool checked = false;        // default of checked mode
  StepMemory* step = nullptr;  // of a part of a step: what the parts share
};

// Shapes, dtypes, strides, devices, alignment, aliasing, option conflicts. Throws Failure. Of
// complete structs (core/structs.h).
Problem check_call(deltic_op op, const deltic_options& options, const deltic_tensors& tensors,
                   const CheckContext& context);
Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_backward_tensors& tensors, const CheckContext& context);
Problem check_call(deltic_op op, const deltic_options& options, const deltic_block_tensors& tensors,
                   const CheckContext& context);
Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_block_backward_tensors& tensors, const CheckContext& context);

Problem check_call(deltic_op op, const deltic_options& options, const deltic_conv_tensors& tensors,
                   const CheckContext& context);
Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_conv_backward_tensors& tensors, const CheckContext& context);

Problem check_call(deltic_op op, const deltic_options& options, const deltic_move_tensors& tensors,
                   const CheckContext& context);

Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_commit_tensors& tensors, const CheckContext& context);

// The umbrella of a step, and its parts, whose rows in between have no memory yet.
Problem check_call(deltic_op op, const deltic_options& options, const deltic_step_tensors& tensors,
                   const CheckContext& context, StepProblem& parts);

// Whether a view shares a byte with memory [data, data + bytes).
bool overlaps(const deltic_tensor& t, const void* data, uint64_t bytes);

// Lengths, pool indices and checkpoint lists of CPU tensors. `scratch` holds
// value_scratch_bytes(p).
size_t value_scratch_bytes(const Problem& p);
void check_values(const Problem& p, std::span<std::byte> scratch);

// The host's copy of the lengths, where there is one.
void check_host_lengths(const Problem& p);

// Checked mode: the first (lowest sequence, token, head) non-finite input, gates above the
// contract.
void check_finite(const Problem& p);

// What checked mode looks at, in the order in which it names them.
struct CheckedRows {
  Rows rows;
  Argument argument;
  int64_t heads, width;
  int32_t diagonal;  // of a triangle per chunk, row r is read before column r + diagonal; -1: whole
};
struct CheckedParam {
  Param param;
  Argument argument;
  int64_t count, per_unit;  // numbers; of them per head or channel
  bool is_channel;
};
struct CheckedInputs {
  static constexpr int kMaxRows = 15, kMaxParams = 4;
  CheckedRows rows[kMaxRows];
  CheckedParam params[kMaxParams];
  int num_rows = 0, num_params = 0;
  bool sums = false;  // of gates above 0
};
CheckedInputs checked_inputs(const Problem& p);
inline constexpr double kMaxGateSum = 8;  // gates above 0 are right below that, per chunk

}  // namespace deltic
