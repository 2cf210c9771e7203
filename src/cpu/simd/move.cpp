// States from slot to slot for every instruction set.
#include "cpu/move_math.h"
#include "cpu/simd/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/move.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/simd/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

struct MoveMath {
  static void load(const void* data, DType type, int64_t at, int64_t count, float* to) {
    load_row(data, type, at, count, count, to);
  }
  static void store(const float* from, int64_t count, void* data, DType type, int64_t at) {
    store_row(from, count, data, type, at);
  }
  static void transpose(const float* from, float* to) {
    HWY_NAMESPACE::transpose(from, move::kBlock, move::kBlock, move::kBlock, to, move::kBlock);
  }
};

size_t move_workspace(const Problem&) { return 0; }
void move_run(const Problem& p, std::span<std::byte>, void*) { move::Move<MoveMath>(p).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltic::cpu {
DELTIC_SIMD_TABLE(move)
}  // namespace deltic::cpu
#endif
