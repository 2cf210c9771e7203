// The recurrent form for every instruction set.
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/decode.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

size_t decode_workspace(const Problem& p) {
  return with_gate<Decode>(p, [](const auto& d) { return d.workspace_bytes(); });
}
void decode_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<Decode>(p, [&](const auto& d) { d.run(workspace); });
}

size_t commit_workspace(const Problem& p) { return decode_workspace(p); }
void commit_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<Decode>(p, [&](const auto& d) { d.commit(workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(decode)
DELTIC_SIMD_TABLE(commit)
}  // namespace deltic::cpu
#endif
