// The gated RMS norm and its gradient for every instruction set.
#include "cpu/norm_math.h"
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Calls f with the norm of a call. Rows of a few numbers may be parallel to their gradient, which
// leaves little of it: those go in fp64.
template <class F>
auto with_norm(const Problem& p, F&& f) {
  constexpr int64_t kFewest = 8;
  return p.K < kFewest ? f(norm::Norm<norm::PlainMath>(p)) : f(norm::Norm<VectorMath>(p));
}
size_t norm_workspace(const Problem& p) {
  return with_norm(p, [](const auto& n) { return n.workspace_bytes(); });
}
void norm_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_norm(p, [&](const auto& n) { n.run(workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(norm)
}  // namespace deltic::cpu
#endif
