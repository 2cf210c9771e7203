// Which instances of the kernels' templates this build has: all of them, or with
// DELTIC_CUDA_SET=ci about one of each, so that a machine without a GPU compiles every template in
// minutes. src/CMakeLists.txt has the list of files; the doors refuse what is missing.
#pragma once

namespace deltic::gpu {

#ifdef DELTIC_CUDA_SET_CI
inline constexpr bool kFullSet = false;
#else
inline constexpr bool kFullSet = true;
#endif
inline constexpr const char* kNotInThisBuild = "not in this build (DELTIC_CUDA_SET=ci)";

}  // namespace deltic::gpu
