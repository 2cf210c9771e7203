#!/usr/bin/env bash
# Everything `make test` does, step by step. A failed step does not hide the next ones; the last line
# counts tests and steps: `N passed, N failed`.
#   tools/test.sh            all steps
#   tools/test.sh NAME...    only these
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
only=("$@")
# Ninja's own default is two jobs more than there are cores.
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

passed=0 failed=0 failures=()
log_folder=$root/build/logs
mkdir -p "$log_folder"

wanted() {
  [ "${#only[@]}" -eq 0 ] && return 0
  local name
  for name in "${only[@]}"; do [ "$name" = "$1" ] && return 0; done
  return 1
}

# step NAME COMMAND...: runs it and counts it. Of a ctest run every test counts.
step() {
  local name=$1
  shift
  wanted "$name" || return 0
  echo "== $name"
  local begin=$SECONDS status log=$log_folder/$name.log
  "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  local total=1 bad=0 line
  line=$(grep -E 'tests passed, [0-9]+ tests failed out of [0-9]+' "$log" | tail -n 1)
  if [ -n "$line" ]; then
    bad=$(sed -E 's/.*, ([0-9]+) tests failed.*/\1/' <<<"$line")
    total=$(sed -E 's/.*out of ([0-9]+).*/\1/' <<<"$line")
  fi
  # A step that fails without a failed test (a build, a crash) counts as one failure.
  if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then
    bad=1
  fi
  passed=$((passed + total - bad)) failed=$((failed + bad))
  if [ "$bad" -gt 0 ]; then
    failures+=("$name")
    echo "== $name: FAILED after $((SECONDS - begin)) s"
  else
    echo "== $name: $((SECONDS - begin)) s"
  fi
}

# configure_and_build PRESET [-DNAME=VALUE...]
configure_and_build() {
  local preset=$1
  shift
  # Where nvcc is but no GPU, one instance of every GPU kernel: the full set takes longer than all of
  # this.
  # They are compiled for Hopper and for the oldest GPU, which has the fewest instructions.
  local kernels=ci archs="80;90a"
  if nvidia-smi -L >/dev/null 2>&1; then kernels=full archs=auto; fi
  cmake --preset "$preset" -DDELTIC_WERROR=ON -DCMAKE_INSTALL_LIBDIR=lib \
    -DDELTIC_CUDA_SET=$kernels -DDELTIC_CUDA_ARCHS="$archs" "$@" &&
    cmake --build --preset "$preset"
}

build_and_test() {
  configure_and_build "$1" && ctest --preset "$1" -j "$CMAKE_BUILD_PARALLEL_LEVEL"
}

# ThreadSanitizer knows OpenMP's barriers only through libomp's tool Archer, which libomp loads by
# itself when it is installed. So first see that a clean program is clean and a race is seen.
tsan_tells_races() {
  local folder=$root/build/tsan-probe
  mkdir -p "$folder"
  cat >"$folder/probe.cpp" <<'CODE'
// Adds with OpenMP threads; with an argument the additions race.
#include <cstdio>
#include <vector>
int main(int argc, char**) {
  std::vector<int> a(1000);
  int sum = 0, racy = 0;
  for (int round = 0; round < 20; ++round) {
#pragma omp parallel for num_threads(4) schedule(dynamic, 7)
    for (int i = 0; i < 1000; ++i) a[i] += i;
#pragma omp parallel for num_threads(4) reduction(+ : sum)
    for (int i = 0; i < 1000; ++i) {
      sum += a[999 - i];
      if (argc > 1) racy += 1;
    }
  }
  return sum == 0 || racy < 0;
}
CODE
  clang++ -O1 -g1 -fopenmp -fsanitize=thread "$folder/probe.cpp" -o "$folder/probe" || return 1
  local options=ignore_noninstrumented_modules=1:halt_on_error=1
  if ! TSAN_OPTIONS=$options "${fixed_addresses[@]}" "$folder/probe" >"$folder/clean.log" 2>&1; then
    cat "$folder/clean.log"
    echo "tsan: a program without a race is reported: is libomp's Archer (libarcher.so) installed?"
    return 1
  fi
  if TSAN_OPTIONS=$options "${fixed_addresses[@]}" "$folder/probe" race >/dev/null 2>&1; then
    echo "tsan: a race is not reported"
    return 1
  fi
  echo "tsan: the probe's race is seen, its clean half is clean"
}

# ThreadSanitizer of clang 14 cannot map its shadow where the kernel spreads addresses over 32 bits.
fixed_addresses=()
if setarch -R true 2>/dev/null; then fixed_addresses=(setarch -R); fi

tsan() {
  tsan_tells_races && configure_and_build tsan && "${fixed_addresses[@]}" ctest --preset tsan -j "$CMAKE_BUILD_PARALLEL_LEVEL"
}

fuzz() {
  configure_and_build fuzz || return 1
  local target=build/fuzz/tests/fuzz/fuzz_c_abi
  local limits=(-timeout=10 -rss_limit_mb=4096 -artifact_prefix=build/fuzz/artifacts/)
  mkdir -p build/fuzz/corpus build/fuzz/artifacts
  # The stored inputs, then a minute of new ones, which stay outside of the tree.
  "$target" "${limits[@]}" -runs=0 tests/fuzz/corpus 2>&1 | tail -n 5 || return 1
  "$target" "${limits[@]}" -max_total_time=60 -print_final_stats=1 build/fuzz/corpus \
    tests/fuzz/corpus 2>&1 | tail -n 25
}

# The consumer project, copied out of the tree, against an installed library: CMake and pkg-config.
consumer() {
  local kind=$1 prefix=$root/build/install/$1 pkg_config=(pkg-config)
  [ "$kind" = static ] && pkg_config=(pkg-config --static)
  rm -rf "$prefix"
  cmake --install "build/$([ "$kind" = static ] && echo static || echo release)" \
    --prefix "$prefix" >/dev/null || return 1
  local folder strict=(-O2 -Wall -Wextra -Wpedantic -Wshadow -Werror)
  folder=$(mktemp -d) || return 1
  cp examples/consumer/* "$folder" || return 1
  (
    set -e
    cd "$folder"
    export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
    [ "$kind" = static ] || export LD_LIBRARY_PATH=$prefix/lib
    cmake -G Ninja -B build -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build build
    env -u LD_LIBRARY_PATH build/prefill_decode
    env -u LD_LIBRARY_PATH build/serving_loop
    env -u LD_LIBRARY_PATH build/forward
    # shellcheck disable=SC2046
    g++ -std=c++20 "${strict[@]}" prefill_decode.cpp -o cpp_program \
      $("${pkg_config[@]}" --cflags --libs deltic)
    # shellcheck disable=SC2046
    gcc -std=c11 "${strict[@]}" forward.c -o c_program $("${pkg_config[@]}" --cflags --libs deltic)
    # Without the CUDA runtime, whatever CMake found above.
    # shellcheck disable=SC2046
    g++ -std=c++20 "${strict[@]}" serving_loop.cpp -o loop_program \
      $("${pkg_config[@]}" --cflags --libs deltic)
    ./cpp_program
    ./c_program
    ./loop_program
  )
  local status=$?
  rm -rf "$folder"
  [ "$status" -eq 0 ] && echo "consumer: $kind library, CMake and pkg-config, C++ and C"
  return "$status"
}

# The program is built once, with the shared library.
static_consumer() {
  configure_and_build static -DDELTIC_BUILD_CLI=OFF -DDELTIC_CUDA=OFF && consumer static
}

# What these tests cannot say on this machine; an empty call is enough to ask.
not_run_here() {
  local program=build/release/cli/deltic
  [ -x "$program" ] || return 0
  "$program" verify --filter 'op=forward gate=head dense=0x5' 2>/dev/null | grep '^not run here:'
}

begin=$SECONDS
step format tools/check_format.sh
step layers tools/check_layers.py
step words tools/check_words.py
step plots bench/plots.py --check
step faults tools/plant_faults.py --check
step release build_and_test release
step symbols tools/check_symbols.sh build/release/src/libdeltic.so
step shared consumer shared
step readme tools/run_readme.py --prefix build/install/shared
step static static_consumer
step demo build/install/shared/bin/deltic demo
step python tools/test_python.sh
step asan-ubsan build_and_test asan-ubsan
step tsan tsan
step fuzz fuzz

if [ "$((passed + failed))" -eq 0 ]; then
  echo "no such step: ${only[*]}"
  exit 2
fi
if [ "$failed" -gt 0 ]; then
  echo "failed: ${failures[*]} (logs in build/logs)"
fi
not_run_here
echo "total time: $((SECONDS - begin)) s"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
