// The oracle's entry in the lists.
#include "reference/reference.h"

#include <span>

#include "reference/operations.h"

namespace deltic::reference {
namespace {

struct Entry {
  size_t (*bytes)(const Problem&);
  void (*run)(const Problem&, std::byte* workspace);
};

Entry entry(const Problem& p) {
  switch (p.op) {
    case DELTIC_FORWARD:
    case DELTIC_DECODE:
      return {recurrence_bytes, run_recurrence};
    case DELTIC_BACKWARD:
      return {backward_bytes, run_backward};
    case DELTIC_CONV:
      return {conv_bytes, run_conv};
    case DELTIC_RMSNORM:
      return {norm_bytes, run_norm};
    case DELTIC_MOVE:
      return {move_bytes, run_move};
    case DELTIC_COMMIT:
      return {commit_bytes, run_commit};
    case DELTIC_STEP:
      return {step_bytes, run_step};
    default:
      return p.is_gradient ? Entry{block_gradients_bytes, run_block_gradients}
                           : Entry{blocks_bytes, run_blocks};
  }
}

const char* nothing_missing() { return nullptr; }
const char* refuse_call(const Problem& p) {
  return p.save != DELTIC_SAVE_NONE ? "keeps nothing for backward" : nullptr;
}
size_t workspace_bytes(const Problem& p) { return entry(p).bytes(p); }
void run(const Problem& p, std::span<std::byte> workspace, void*) {
  entry(p).run(p, workspace.data());
}

}  // namespace

// One entry serves every operation: the problem says which it is.
const Implementation& implementation(deltic_op) {
  static const Implementation oracle{
      "reference", nothing_missing, refuse_call, workspace_bytes, run, true};
  return oracle;
}

}  // namespace deltic::reference
