// The chunked backward for every instruction set.
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/backward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

size_t backward_workspace(const Problem& p) {
  return with_gate<Backward>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void backward_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<Backward>(p, [&](const auto& b) { b.run(workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(backward)
}  // namespace deltic::cpu
#endif
