// Which code a build has for GPUs, and which of it a driver takes for one of them.
#pragma once

#include <string>
#include <string_view>

namespace deltic::gpu {

// A build's parts as DELTIC_CUDA_ARCHS lists them, in one text: `80 86 90a 90-ptx`.
// Versions are numbers such as 86, compute capability 8.6.
struct CodeRules {
  bool only_ptx = false;  // the driver is told to compile itself: CUDA_FORCE_PTX_JIT=1
  bool no_ptx = false;    // or never to: CUDA_DISABLE_PTX_JIT=1
};

// The version that the code was compiled for which a GPU of `version` runs: machine code of the
// same major version and at most its minor one, else PTX of at most its version; 0: there is none.
int code_for(std::string_view archs, int version, CodeRules rules = {});
// Whether there are the kernels of Hopper alone, machine code for compute capability 9.0.
bool has_hopper_code(std::string_view archs, int version, CodeRules rules = {});
// In words: `sm_80, sm_90a, PTX of compute_90`.
std::string code_text(std::string_view archs);

}  // namespace deltic::gpu
