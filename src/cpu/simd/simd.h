// The SIMD backend's doors: per operation, one pair of functions for each instruction set.
#pragma once

#include <span>

#include "core/dispatch.h"
#include "cpu/features.h"

// The instruction sets this backend is compiled for, best first. Highway needs a baseline that is
// always compiled; on x86-64 that is SSE4, below it the plain implementation serves. SVE has no
// fixed vector length, which the register blocks here need.
#include <hwy/detect_compiler_arch.h>
#if HWY_ARCH_X86
#define HWY_BASELINE_TARGETS HWY_SSE4
#else
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#include <hwy/detect_targets.h>

namespace deltic::cpu {

struct SimdDoor {
  const char* name;  // of the implementation: `cpu.avx512`
  const char* (*missing)();
  size_t (*workspace_bytes)(const Problem&);
  void (*run)(const Problem&, std::span<std::byte>, void*);
};

inline const char* nothing_missing() { return nullptr; }

std::span<const SimdDoor> forward_doors();
std::span<const SimdDoor> tile_forward_doors();  // AMX
std::span<const SimdDoor> decode_doors();
std::span<const SimdDoor> block_doors();
std::span<const SimdDoor> conv_doors();
std::span<const SimdDoor> norm_doors();
std::span<const SimdDoor> move_doors();
std::span<const SimdDoor> commit_doors();
std::span<const SimdDoor> backward_doors();
std::span<const SimdDoor> tile_backward_doors();

}  // namespace deltic::cpu

#if HWY_TARGETS & HWY_AVX3
#define DELTIC_DOOR_AVX512(op) \
  {"cpu.avx512", avx512_missing, N_AVX3::op##_workspace, N_AVX3::op##_run},
#else
#define DELTIC_DOOR_AVX512(op)
#endif
#if HWY_TARGETS & HWY_AVX2
#define DELTIC_DOOR_AVX2(op) {"cpu.avx2", avx2_missing, N_AVX2::op##_workspace, N_AVX2::op##_run},
#else
#define DELTIC_DOOR_AVX2(op)
#endif
#if HWY_TARGETS & HWY_SSE4
#define DELTIC_DOOR_BASELINE(op) \
  {"cpu.sse4", sse4_missing, N_SSE4::op##_workspace, N_SSE4::op##_run},
#elif HWY_TARGETS & HWY_NEON
#define DELTIC_DOOR_BASELINE(op) \
  {"cpu.neon", nothing_missing, N_NEON::op##_workspace, N_NEON::op##_run},
#else
#define DELTIC_DOOR_BASELINE(op)
#endif

// The table of an operation; used once per source file, after the last target.
#define DELTIC_SIMD_TABLE(op)                                                    \
  std::span<const SimdDoor> op##_doors() {                                       \
    static const SimdDoor doors[] = {DELTIC_DOOR_AVX512(op) DELTIC_DOOR_AVX2(op) \
                                         DELTIC_DOOR_BASELINE(op)};              \
    return doors;                                                                \
  }

// The same for AMX tiles.
#if HWY_TARGETS & HWY_AVX3
#define DELTIC_TILE_TABLE(op)                                                              \
  std::span<const SimdDoor> tile_##op##_doors() {                                          \
    static const SimdDoor doors[] = {                                                      \
        {"cpu.amx", amx_missing, N_AVX3::tile_##op##_workspace, N_AVX3::tile_##op##_run}}; \
    return doors;                                                                          \
  }
#else
#define DELTIC_TILE_TABLE(op) \
  std::span<const SimdDoor> tile_##op##_doors() { return {}; }
#endif
