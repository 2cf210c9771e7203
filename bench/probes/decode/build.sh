#!/bin/sh
# Builds OUTPUT (build/decode_probe): moves of states in several patterns, and the decode kernel, timed.
set -e
cd "$(dirname "$0")/../../.."
mkdir -p build
${NVCC:-nvcc} -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Isrc -Iinclude \
  -cudart static "$@" bench/probes/decode/main.cu -o "${OUTPUT:-build/decode_probe}"
