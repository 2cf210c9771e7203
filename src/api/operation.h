// One path for every operation: validate once, choose an implementation, run.
#pragma once

#include "deltic/deltic.h"

namespace deltic {

template <class Tensors>
void workspace_query(deltic_op op, const deltic_options* options, const Tensors* tensors,
                     void* stream, uint64_t* bytes);
// Bytes of tensors.saved for options.save.
void saved_query(const deltic_options* options, const deltic_tensors* tensors, uint64_t* bytes);
// What backward needs and forward keeps for it with a deltic_save.
void memory_query(const deltic_options* options, const deltic_backward_tensors* tensors,
                  int32_t save, void* stream, deltic_memory_plan* plan);
template <class Tensors>
void run_operation(deltic_op op, const deltic_options* options, const Tensors* tensors,
                   const deltic_workspace* workspace, void* stream);
// Fails as the last checked call on a GPU's workspace should have; waits for the stream.
void device_error(const deltic_workspace* workspace, void* stream);
template <class Tensors>
void explain_operation(deltic_op op, const deltic_options* options, const Tensors* tensors,
                       deltic_explain_fn fn, void* user);
template <class Tensors>
void explain_division(deltic_op op, const deltic_options* options, const Tensors* tensors,
                      int32_t num_sms, void* stream, deltic_division_fn fn, void* user);

extern template void explain_division(deltic_op, const deltic_options*, const deltic_tensors*,
                                      int32_t, void*, deltic_division_fn, void*);
extern template void explain_division(deltic_op, const deltic_options*,
                                      const deltic_backward_tensors*, int32_t, void*,
                                      deltic_division_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*, const deltic_tensors*, void*,
                                     uint64_t*);
extern template void workspace_query(deltic_op, const deltic_options*, const deltic_block_tensors*,
                                     void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_tensors*,
                                   const deltic_workspace*, void*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_block_tensors*,
                                   const deltic_workspace*, void*);
extern template void explain_operation(deltic_op, const deltic_options*, const deltic_tensors*,
                                       deltic_explain_fn, void*);
extern template void explain_operation(deltic_op, const deltic_options*,
                                       const deltic_block_tensors*, deltic_explain_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*,
                                     const deltic_backward_tensors*, void*, uint64_t*);

extern template void run_operation(deltic_op, const deltic_options*, const deltic_backward_tensors*,
                                   const deltic_workspace*, void*);

extern template void explain_operation(deltic_op, const deltic_options*,
                                       const deltic_backward_tensors*, deltic_explain_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*,
                                     const deltic_block_backward_tensors*, void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*,
                                   const deltic_block_backward_tensors*, const deltic_workspace*,
                                   void*);
extern template void explain_operation(deltic_op, const deltic_options*,
                                       const deltic_block_backward_tensors*, deltic_explain_fn,
                                       void*);

extern template void workspace_query(deltic_op, const deltic_options*, const deltic_conv_tensors*,
                                     void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_conv_tensors*,
                                   const deltic_workspace*, void*);
extern template void explain_operation(deltic_op, const deltic_options*, const deltic_conv_tensors*,
                                       deltic_explain_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*,
                                     const deltic_conv_backward_tensors*, void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*,
                                   const deltic_conv_backward_tensors*, const deltic_workspace*,
                                   void*);
extern template void explain_operation(deltic_op, const deltic_options*,
                                       const deltic_conv_backward_tensors*, deltic_explain_fn,
                                       void*);

extern template void workspace_query(deltic_op, const deltic_options*, const deltic_move_tensors*,
                                     void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_move_tensors*,
                                   const deltic_workspace*, void*);
extern template void explain_operation(deltic_op, const deltic_options*, const deltic_move_tensors*,
                                       deltic_explain_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*, const deltic_commit_tensors*,
                                     void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_commit_tensors*,
                                   const deltic_workspace*, void*);
extern template void explain_operation(deltic_op, const deltic_options*,
                                       const deltic_commit_tensors*, deltic_explain_fn, void*);

extern template void workspace_query(deltic_op, const deltic_options*, const deltic_step_tensors*,
                                     void*, uint64_t*);
extern template void run_operation(deltic_op, const deltic_options*, const deltic_step_tensors*,
                                   const deltic_workspace*, void*);
extern template void explain_operation(deltic_op, const deltic_options*, const deltic_step_tensors*,
                                       deltic_explain_fn, void*);

}  // namespace deltic
