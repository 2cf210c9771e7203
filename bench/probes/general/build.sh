#!/bin/sh
# Builds OUTPUT (build/general_probe) from this file and the objects of a build with DELTIC_CUDA=ON:
#   build.sh BUILD_FOLDER
set -e
cd "$(dirname "$0")/../../.."
objects=$(find "${1:?folder of a build}/src/CMakeFiles/deltic_cuda.dir" \
  "$1/src/CMakeFiles/deltic_objects.dir/core" -name '*.o')
# shellcheck disable=SC2086
${NVCC:-nvcc} -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Isrc -Iinclude \
  -cudart static bench/probes/general/main.cu $objects -o "${OUTPUT:-build/general_probe}"
