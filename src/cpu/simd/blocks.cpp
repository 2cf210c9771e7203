// The building blocks and their gradients for every instruction set.
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

size_t block_workspace(const Problem& p) {
  if (p.is_gradient) {
    return with_gate<BlockGradients>(p, [](const auto& b) { return b.workspace_bytes(); });
  }
  return with_gate<Blocks>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void block_run(const Problem& p, std::span<std::byte> workspace, void*) {
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
