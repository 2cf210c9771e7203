// The building blocks and their gradients for every instruction set.
#include "cpu/block_gradients.h"
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/blocks.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/block_gradients-inl.h"
#include "cpu/simd/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// The gradient of a gate per head is one number per token: loading it into a vector takes longer
// (0.6 ms per 8192 of them against 0.2 ms) than the general code.
bool needs_no_vectors(const Problem& p) {
  const bool is_gate = p.op == DELTIC_CUMSUM || p.op == DELTIC_GATE;
  return p.is_gradient && is_gate && p.gate == Gate::head;
}

size_t block_workspace(const Problem& p) {
  if (needs_no_vectors(p)) return block_gradients::workspace_bytes(p);
  if (p.is_gradient) {
    return with_gate<BlockGradients>(p, [](const auto& b) { return b.workspace_bytes(); });
  }
  return with_gate<Blocks>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void block_run(const Problem& p, std::span<std::byte> workspace, void*) {
  if (needs_no_vectors(p)) return block_gradients::run(p, workspace);
  if (p.is_gradient) {
    return with_gate<BlockGradients>(p, [&](const auto& b) { b.run(workspace); });
  }
  with_gate<Blocks>(p, [&](const auto& b) { b.run(workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(block)
}  // namespace deltic::cpu
#endif
