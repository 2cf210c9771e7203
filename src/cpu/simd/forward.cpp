// The chunked forward for every instruction set.
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/forward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/forward-inl.h"
#include "cpu/simd/tile_engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

template <Gate kGate>
using Fp32Forward = Forward<kGate, Fp32Engine>;

size_t forward_workspace(const Problem& p) {
  return with_gate<Fp32Forward>(p, [](const auto& f) { return f.workspace_bytes(); });
}
void forward_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<Fp32Forward>(p, [&](const auto& f) { f.run(workspace); });
}

#if HWY_TARGET == HWY_AVX3
template <Gate kGate>
using TileForward = Forward<kGate, TileEngine>;

size_t tile_forward_workspace(const Problem& p) {
  return with_gate<TileForward>(p, [](const auto& f) { return f.workspace_bytes(); });
}
void tile_forward_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<TileForward>(p, [&](const auto& f) { f.run(workspace); });
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(forward)
DELTIC_TILE_TABLE(forward)
}  // namespace deltic::cpu
#endif
