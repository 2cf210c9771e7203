#!/bin/sh
# Builds build/probe. CUTLASS: folder with CUTLASS's include files (the nvidia-cutlass package has them under source/include).
set -e
cd "$(dirname "$0")"
mkdir -p build
${NVCC:-nvcc} -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v,-warn-spills \
  -I"${CUTLASS:?folder with CUTLASS include files}" -cudart static "$@" main.cu -o "${OUTPUT:-build/probe}"
