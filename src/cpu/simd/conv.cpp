// The causal depthwise convolution and its gradient for every instruction set.
#include "cpu/conv_math.h"
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/conv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/conv-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Where nothing came back for the outputs there is only the final state's gradient to hand on.
bool is_handed_on(const Problem& p) { return p.is_gradient && !p.d_out; }

size_t conv_workspace(const Problem& p) {
  if (is_handed_on(p)) return 0;
  return Conv(p).workspace_bytes();
}
void conv_run(const Problem& p, std::span<std::byte> workspace, void*) {
  if (is_handed_on(p)) return conv::run(p);
  Conv(p).run(workspace);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(conv)
}  // namespace deltic::cpu
#endif
