// The C functions of the operations.
#include "api/guard.h"
#include "api/operation.h"
#include "core/check.h"

using namespace deltic;

namespace {
deltic_op block_op(int32_t op, const char* function = "block",
                   const char* numbers = "2 to 8, 11 or 12") {
  if (op < 0 || op >= DELTIC_NUM_OPS || !is_block(static_cast<deltic_op>(op))) {
    fail(DELTIC_INVALID_ARGUMENT, function, ": op: expected a building block, ", numbers, ", got ",
         deltic_op_name(op), " (", op, ")");
  }
  return static_cast<deltic_op>(op);
}
// Of those, one whose gradient is an operation too.
deltic_op block_gradient_op(int32_t op) {
  if (op == DELTIC_SCORES_INVERSE) {
    fail(DELTIC_INVALID_ARGUMENT,
         "block_backward: op: expected a building block with a gradient of its own (that of "
         "scores_inverse is made of those of scores, inverse and kkt), got scores_inverse (",
         op, ")");
  }
  return block_op(op, "block_backward", "2 to 8 or 12");
}
deltic_op main_op(int32_t op) {
  if (op == DELTIC_BACKWARD) {
    fail(DELTIC_INVALID_ARGUMENT,
         "explain: op: expected forward or decode, got backward (see deltic_backward_explain)");
  }
  if (op != DELTIC_FORWARD && op != DELTIC_DECODE) {
    fail(DELTIC_INVALID_ARGUMENT, "explain: op: expected forward or decode, got ",
         deltic_op_name(op), " (", op, ")");
  }
  return static_cast<deltic_op>(op);
}
}  // namespace

deltic_status deltic_forward_workspace(const deltic_options* options, const deltic_tensors* tensors,
                                       void* stream, uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_FORWARD, options, tensors, stream, bytes); });
}
deltic_status deltic_forward(const deltic_options* options, const deltic_tensors* tensors,
                             const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_FORWARD, options, tensors, workspace, stream); });
}
deltic_status deltic_forward_saved(const deltic_options* options, const deltic_tensors* tensors,
                                   uint64_t* bytes) {
  return guard([&] { saved_query(options, tensors, bytes); });
}
deltic_status deltic_backward_workspace(const deltic_options* options,
                                        const deltic_backward_tensors* tensors, void* stream,
                                        uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_BACKWARD, options, tensors, stream, bytes); });
}
deltic_status deltic_backward(const deltic_options* options, const deltic_backward_tensors* tensors,
                              const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_BACKWARD, options, tensors, workspace, stream); });
}
deltic_status deltic_decode_workspace(const deltic_options* options, const deltic_tensors* tensors,
                                      void* stream, uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_DECODE, options, tensors, stream, bytes); });
}
deltic_status deltic_decode(const deltic_options* options, const deltic_tensors* tensors,
                            const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_DECODE, options, tensors, workspace, stream); });
}
deltic_status deltic_block_workspace(int32_t op, const deltic_options* options,
                                     const deltic_block_tensors* tensors, void* stream,
                                     uint64_t* bytes) {
  return guard([&] { workspace_query(block_op(op), options, tensors, stream, bytes); });
}
deltic_status deltic_block(int32_t op, const deltic_options* options,
                           const deltic_block_tensors* tensors, const deltic_workspace* workspace,
                           void* stream) {
  return guard([&] { run_operation(block_op(op), options, tensors, workspace, stream); });
}
deltic_status deltic_device_error(const deltic_workspace* workspace, void* stream) {
  return guard([&] { device_error(workspace, stream); });
}
deltic_status deltic_explain(int32_t op, const deltic_options* options,
                             const deltic_tensors* tensors, deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(main_op(op), options, tensors, fn, user); });
}
deltic_status deltic_explain_division(const deltic_options* options, const deltic_tensors* tensors,
                                      int32_t num_sms, void* stream, deltic_division_fn fn,
                                      void* user) {
  return guard(
      [&] { explain_division(DELTIC_FORWARD, options, tensors, num_sms, stream, fn, user); });
}
deltic_status deltic_backward_explain_division(const deltic_options* options,
                                               const deltic_backward_tensors* tensors,
                                               int32_t num_sms, void* stream, deltic_division_fn fn,
                                               void* user) {
  return guard(
      [&] { explain_division(DELTIC_BACKWARD, options, tensors, num_sms, stream, fn, user); });
}
deltic_status deltic_backward_explain(const deltic_options* options,
                                      const deltic_backward_tensors* tensors, deltic_explain_fn fn,
                                      void* user) {
  return guard([&] { explain_operation(DELTIC_BACKWARD, options, tensors, fn, user); });
}
deltic_status deltic_backward_memory(const deltic_options* options,
                                     const deltic_backward_tensors* tensors, int32_t save,
                                     void* stream, deltic_memory_plan* plan) {
  return guard([&] { memory_query(options, tensors, save, stream, plan); });
}
deltic_status deltic_block_explain(int32_t op, const deltic_options* options,
                                   const deltic_block_tensors* tensors, deltic_explain_fn fn,
                                   void* user) {
  return guard([&] { explain_operation(block_op(op), options, tensors, fn, user); });
}
deltic_status deltic_block_backward_workspace(int32_t op, const deltic_options* options,
                                              const deltic_block_backward_tensors* tensors,
                                              void* stream, uint64_t* bytes) {
  return guard([&] { workspace_query(block_gradient_op(op), options, tensors, stream, bytes); });
}
deltic_status deltic_block_backward(int32_t op, const deltic_options* options,
                                    const deltic_block_backward_tensors* tensors,
                                    const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(block_gradient_op(op), options, tensors, workspace, stream); });
}
deltic_status deltic_block_backward_explain(int32_t op, const deltic_options* options,
                                            const deltic_block_backward_tensors* tensors,
                                            deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(block_gradient_op(op), options, tensors, fn, user); });
}
deltic_status deltic_conv_workspace(const deltic_options* options,
                                    const deltic_conv_tensors* tensors, void* stream,
                                    uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_CONV, options, tensors, stream, bytes); });
}
deltic_status deltic_conv(const deltic_options* options, const deltic_conv_tensors* tensors,
                          const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_CONV, options, tensors, workspace, stream); });
}
deltic_status deltic_conv_explain(const deltic_options* options, const deltic_conv_tensors* tensors,
                                  deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(DELTIC_CONV, options, tensors, fn, user); });
}
deltic_status deltic_conv_backward_workspace(const deltic_options* options,
                                             const deltic_conv_backward_tensors* tensors,
                                             void* stream, uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_CONV, options, tensors, stream, bytes); });
}
deltic_status deltic_conv_backward(const deltic_options* options,
                                   const deltic_conv_backward_tensors* tensors,
                                   const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_CONV, options, tensors, workspace, stream); });
}
deltic_status deltic_conv_backward_explain(const deltic_options* options,
                                           const deltic_conv_backward_tensors* tensors,
                                           deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(DELTIC_CONV, options, tensors, fn, user); });
}
deltic_status deltic_move_workspace(const deltic_options* options,
                                    const deltic_move_tensors* tensors, void* stream,
                                    uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_MOVE, options, tensors, stream, bytes); });
}
deltic_status deltic_move(const deltic_options* options, const deltic_move_tensors* tensors,
                          const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_MOVE, options, tensors, workspace, stream); });
}
deltic_status deltic_move_explain(const deltic_options* options, const deltic_move_tensors* tensors,
                                  deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(DELTIC_MOVE, options, tensors, fn, user); });
}
deltic_status deltic_commit_workspace(const deltic_options* options,
                                      const deltic_commit_tensors* tensors, void* stream,
                                      uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_COMMIT, options, tensors, stream, bytes); });
}
deltic_status deltic_commit(const deltic_options* options, const deltic_commit_tensors* tensors,
                            const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_COMMIT, options, tensors, workspace, stream); });
}
deltic_status deltic_commit_explain(const deltic_options* options,
                                    const deltic_commit_tensors* tensors, deltic_explain_fn fn,
                                    void* user) {
  return guard([&] { explain_operation(DELTIC_COMMIT, options, tensors, fn, user); });
}
deltic_status deltic_step_workspace(const deltic_options* options,
                                    const deltic_step_tensors* tensors, void* stream,
                                    uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_STEP, options, tensors, stream, bytes); });
}
deltic_status deltic_step(const deltic_options* options, const deltic_step_tensors* tensors,
                          const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_STEP, options, tensors, workspace, stream); });
}
deltic_status deltic_step_explain(const deltic_options* options, const deltic_step_tensors* tensors,
                                  deltic_explain_fn fn, void* user) {
  return guard([&] { explain_operation(DELTIC_STEP, options, tensors, fn, user); });
}
