// Included ahead of every kernel's source: what nvcc knows by itself, for a compiler of the host.
// Kernels become functions that each thread of a CTA calls; shared memory is that of the host's
// thread the CTA runs on.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cta.h"

// `extern` arrays are those of cta.cpp; within a function all others are static.
#undef __shared__
#define __shared__ thread_local
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __align__
#define __align__(n) __attribute__((aligned(n)))

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// --- numbers
// ---------------------------------------------------------------------------------------
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = s >> (4 * i) & 0xF;
    unsigned b = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xFF;
    if (pick & 8) b = b & 0x80 ? 0xFF : 0;
    r |= b << (8 * i);
  }
  return r;
}
using std::isfinite;
using std::isinf;
using std::isnan;
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
// nvcc's have overloads for mixed integers.
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// --- threads
// -----------------------------------------------------------------------------------------
inline void __syncthreads() { deltic::emulator::Cta::current().sync(0); }
inline int __syncthreads_count(int x) { return deltic::emulator::Cta::current().sync(x != 0); }
inline int __syncthreads_or(int x) { return __syncthreads_count(x) > 0; }
inline int __syncthreads_and(int x) { return __syncthreads_count(x == 0) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace deltic::emulator {
template <class T>
struct Shuffled {
  T value, result;
  int source;
};
// source: a lane of the warp.
template <class T>
T shuffle(unsigned mask, T value, int source) {
  Shuffled<T> own{value, value, source};
  together(mask, own, [](Shuffled<T>** lanes, uint32_t present) {
    for (int l = 0; l < kWarpLanes; ++l) {
      if (!(present >> l & 1)) continue;
      if (!(present >> lanes[l]->source & 1)) fault("a shuffle from a lane that is not there");
      lanes[l]->result = lanes[lanes[l]->source]->value;
    }
  });
  return own.result;
}
template <class Value, class Combine>
Value combine(unsigned mask, Value value, Combine) {
  together(mask, value, [](Value** lanes, uint32_t present) {
    Value all{};
    bool is_first = true;
    for (int l = 0; l < kWarpLanes; ++l) {
      if (!(present >> l & 1)) continue;
      all = is_first ? *lanes[l] : Combine{}(all, *lanes[l]);
      is_first = false;
    }
    for (int l = 0; l < kWarpLanes; ++l)
      if (present >> l & 1) *lanes[l] = all;
  });
  return value;
}
}  // namespace deltic::emulator

inline void __syncwarp(unsigned mask = ~0u) {
  char own = 0;
  deltic::emulator::together(mask, own, [](char**, uint32_t) {});
}
template <class T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32) {
  const int lane = deltic::emulator::Cta::lane();
  return deltic::emulator::shuffle(mask, x, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int with, int width = 32) {
  const int lane = deltic::emulator::Cta::lane(), from = lane ^ with;
  return deltic::emulator::shuffle(mask, x, from / width == lane / width ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int lane = deltic::emulator::Cta::lane(), from = lane - static_cast<int>(by);
  return deltic::emulator::shuffle(mask, x, from >= (lane & ~(width - 1)) ? from : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int lane = deltic::emulator::Cta::lane(), from = lane + static_cast<int>(by);
  return deltic::emulator::shuffle(mask, x, from < (lane & ~(width - 1)) + width ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  const unsigned own = (x != 0 ? 1u : 0u) << deltic::emulator::Cta::lane();
  return deltic::emulator::combine(mask, own, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x == 0) == 0; }
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
  return deltic::emulator::combine(mask, x, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_add_sync(unsigned mask, T x) {
  return deltic::emulator::combine(mask, x, [](T a, T b) { return static_cast<T>(a + b); });
}

// One thread runs at a time.
template <class T, class U>
T atomicAdd(T* at, U x) {
  const T before = *at;
  *at = static_cast<T>(before + static_cast<T>(x));
  return before;
}
template <class T, class U>
T atomicMin(T* at, U x) {
  const T before = *at;
  *at = before < static_cast<T>(x) ? before : static_cast<T>(x);
  return before;
}
template <class T, class U>
T atomicMax(T* at, U x) {
  const T before = *at;
  *at = before < static_cast<T>(x) ? static_cast<T>(x) : before;
  return before;
}
template <class T, class U>
T atomicOr(T* at, U x) {
  const T before = *at;
  *at = static_cast<T>(before | static_cast<T>(x));
  return before;
}
