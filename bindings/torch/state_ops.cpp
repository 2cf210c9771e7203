// Operators on states alone, in pools.
#include "bridge.h"

namespace deltic::bridge {
namespace {

void move_(const Tensor& state_pool, const MaybeTensor& write_pool, const Tensor& read_index,
           const Tensor& write_index, int64_t read_head, int64_t write_head, int64_t num_heads,
           bool transpose, const std::string& options) {
  const Call call("move_", options);
  deltic_move_tensors t;
  deltic_move_tensors_init(&t, sizeof t);
  t.state_pool = call.as_given("state_pool", state_pool);
  t.write_pool = call.as_given("write_pool", write_pool);
  t.read_index = call.as_given("read_index", read_index);
  t.write_index = call.as_given("write_index", write_index);
  t.read_head = read_head, t.write_head = write_head, t.num_heads = num_heads;
  t.transpose = transpose ? 1 : 0;
  void* stream = stream_of(t.state_pool);
  uint64_t bytes = 0;
  check(deltic_move_workspace(&call.options.c, &t, stream, &bytes));
  const Workspace workspace(bytes, t.state_pool);
  check_call(deltic_move(&call.options.c, &t, workspace.c(), stream), workspace, t.state_pool);
}

void commit_(const Tensor& state_pool, const Tensor& record, const Tensor& accepted,
             const MaybeTensor& read_index, const MaybeTensor& write_index,
             const MaybeTensor& has_initial_state, const MaybeTensor& parents,
             const std::string& options) {
  const Call call("commit_", options);
  deltic_commit_tensors t;
  deltic_commit_tensors_init(&t, sizeof t);
  t.state_pool = call.as_given("state_pool", state_pool);
  t.record = call.as_given("record", record);
  t.accepted = call.as_given("accepted", accepted);
  t.read_index = call.as_given("read_index", read_index);
  t.write_index = call.as_given("write_index", write_index);
  t.has_initial_state = call.flags("has_initial_state", has_initial_state);
  t.parents = call.as_given("parents", parents);
  void* stream = stream_of(t.state_pool);
  uint64_t bytes = 0;
  check(deltic_commit_workspace(&call.options.c, &t, stream, &bytes));
  const Workspace workspace(bytes, t.state_pool);
  check_call(deltic_commit(&call.options.c, &t, workspace.c(), stream), workspace, t.state_pool);
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("move_", TORCH_BOX(&move_));
  m.impl("commit_", TORCH_BOX(&commit_));
}

DELTIC_TORCH_OPERATORS(DELTIC_TORCH_NAMESPACE, m) {
  m.def(
      "move_(Tensor(a!) state_pool, Tensor(b!)? write_pool, Tensor read_index, Tensor write_index, "
      "int read_head=0, int write_head=0, int num_heads=0, bool transpose=False, str options='') "
      "-> ()");
  m.def(
      "commit_(Tensor(a!) state_pool, Tensor record, Tensor accepted, Tensor? read_index, Tensor? "
      "write_index, Tensor? has_initial_state, Tensor? parents, str options='') -> ()");
}

DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CPU, m) { register_kernels(m); }
DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace deltic::bridge
