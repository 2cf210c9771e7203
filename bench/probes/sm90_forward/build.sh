#!/bin/sh
# Builds build/probe: the forward's own sources and the program that checks and times it.
set -e
cd "$(dirname "$0")"
mkdir -p build
root=../../..
${NVCC:-nvcc} -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v,-warn-spills \
  --expt-relaxed-constexpr -I$root/src -I$root/include -DDELTIC_CUDA_ARCHS='"90a"' -DDELTIC_CUDA_SMEM_KB=0 -cudart static "$@" main.cu \
  $root/src/cuda/device.cpp $root/src/cuda/code.cpp $root/src/cuda/tensor_map.cpp $root/src/cuda/saved.cpp $root/src/cuda/saved_header.cu $root/src/cuda/schedule/*.cpp \
  $root/src/cuda/sm90/forward/*.cu $root/src/cuda/sm90/forward/instantiations/*.cu \
  $root/src/cuda/sm80/recurrence/launch.cu $root/src/cuda/sm80/recurrence/instantiations/*.cu \
  -o "${OUTPUT:-build/probe}"
