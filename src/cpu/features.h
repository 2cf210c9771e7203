// What the CPU has, asked at run time.
#pragma once

#include <string>

namespace deltic::cpu {
// Null, or the sentence why the machine cannot run it.
const char* avx512_missing();
const char* avx2_missing();
const char* sse4_missing();
const char* amx_missing();

std::string features_found();
}  // namespace deltic::cpu
