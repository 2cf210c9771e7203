// What the CPU has, asked at run time.
#include "cpu/features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace deltic::cpu {

#if defined(__x86_64__)

namespace {

// CPUID leaf 1, ECX bit 29: clang 14 does not know the name. AVX2's check covers the system's part.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}

}  // namespace

// GCC's and clang's check includes the operating system's part (XGETBV).
const char* avx512_missing() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && avx2_missing() == nullptr;
  return has ? nullptr : "the CPU has no AVX-512 (F, VL, DQ, BW, CD)";
}
const char* avx2_missing() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("bmi2") && has_f16c();
  return has ? nullptr : "the CPU has no AVX2 with FMA, BMI2 and F16C";
}
const char* sse4_missing() {
  static const bool has = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") &&
                          __builtin_cpu_supports("aes");
  return has ? nullptr : "the CPU has no SSE4.2 with AES and CLMUL";
}

std::string features_found() {
  std::string s = "x86-64";
  const auto add = [&](const char* name, bool has) {
    if (has) s.append(1, ' ').append(name);
  };
  add("sse4.2", __builtin_cpu_supports("sse4.2"));
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("f16c", has_f16c());
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
  add("amx-bf16", amx_missing() == nullptr);
  return s;
}

#else

const char* avx512_missing() { return "not an x86-64 CPU"; }
const char* avx2_missing() { return "not an x86-64 CPU"; }
const char* sse4_missing() { return "not an x86-64 CPU"; }
std::string features_found() { return "portable"; }

#endif

}  // namespace deltic::cpu
