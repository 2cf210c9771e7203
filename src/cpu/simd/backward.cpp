// The chunked backward for every instruction set.
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/backward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/backward-inl.h"
#include "cpu/simd/tile_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

template <Gate kGate>
using Fp32Backward = Backward<kGate, Fp32Gradients>;

size_t backward_workspace(const Problem& p) {
  return with_gate<Fp32Backward>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void backward_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<Fp32Backward>(p, [&](const auto& b) { b.run(workspace); });
}

#if HWY_TARGET == HWY_AVX3
template <Gate kGate>
using TileBackward = Backward<kGate, TileGradients>;

size_t tile_backward_workspace(const Problem& p) {
  return with_gate<TileBackward>(p, [](const auto& b) { return b.workspace_bytes(); });
}
void tile_backward_run(const Problem& p, std::span<std::byte> workspace, void*) {
  with_gate<TileBackward>(p, [&](const auto& b) { b.run(workspace); });
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(backward)
DELTIC_TILE_TABLE(backward)
}  // namespace deltic::cpu
#endif
