// The C functions of the operations.
#include "api/guard.h"
#include "api/operation.h"
#include "core/check.h"

using namespace deltic;

namespace {
void check_block_op(deltic_op op) {
  if (op < DELTIC_CUMSUM || op > DELTIC_WY) {
    fail(DELTIC_INVALID_ARGUMENT, "block: op: expected a building block, got ", name_of(op), " (",
         static_cast<int>(op), ")");
  }
}
void check_main_op(deltic_op op) {
  if (op != DELTIC_FORWARD && op != DELTIC_DECODE) {
    fail(DELTIC_INVALID_ARGUMENT, "explain: op: expected forward or decode, got ", name_of(op),
         " (", static_cast<int>(op), ")");
  }
}
}  // namespace

deltic_status deltic_forward_workspace(const deltic_options* options, const deltic_tensors* tensors,
                                       uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_FORWARD, options, tensors, bytes); });
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
                                        const deltic_backward_tensors* tensors, uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_BACKWARD, options, tensors, bytes); });
}
deltic_status deltic_backward(const deltic_options* options, const deltic_backward_tensors* tensors,
                              const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_BACKWARD, options, tensors, workspace, stream); });
}
deltic_status deltic_decode_workspace(const deltic_options* options, const deltic_tensors* tensors,
                                      uint64_t* bytes) {
  return guard([&] { workspace_query(DELTIC_DECODE, options, tensors, bytes); });
}
deltic_status deltic_decode(const deltic_options* options, const deltic_tensors* tensors,
                            const deltic_workspace* workspace, void* stream) {
  return guard([&] { run_operation(DELTIC_DECODE, options, tensors, workspace, stream); });
}
deltic_status deltic_block_workspace(deltic_op op, const deltic_options* options,
                                     const deltic_block_tensors* tensors, uint64_t* bytes) {
  return guard([&] {
    check_block_op(op);
    workspace_query(op, options, tensors, bytes);
  });
}
deltic_status deltic_block(deltic_op op, const deltic_options* options,
                           const deltic_block_tensors* tensors, const deltic_workspace* workspace,
                           void* stream) {
  return guard([&] {
    check_block_op(op);
    run_operation(op, options, tensors, workspace, stream);
  });
}
deltic_status deltic_explain(deltic_op op, const deltic_options* options,
                             const deltic_tensors* tensors, deltic_explain_fn fn, void* user) {
  return guard([&] {
    check_main_op(op);
    explain_operation(op, options, tensors, fn, user);
  });
}
deltic_status deltic_block_explain(deltic_op op, const deltic_options* options,
                                   const deltic_block_tensors* tensors, deltic_explain_fn fn,
                                   void* user) {
  return guard([&] {
    check_block_op(op);
    explain_operation(op, options, tensors, fn, user);
  });
}
