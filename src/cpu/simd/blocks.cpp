// The building blocks for every instruction set.
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/blocks.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

size_t block_workspace(const Problem& p) {
  return with_gate<Blocks>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void block_run(const Problem& p, std::span<std::byte> workspace, void*) {
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
