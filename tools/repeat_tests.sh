#!/usr/bin/env bash
# Runs test programs again and again with a malloc that puts every block somewhere else and fills it
# with another byte: a test that depends on where the allocator put things fails in some run.
#
#   tools/repeat_tests.sh [RUNS [BUILD [PROGRAM...]]]     20, build/release, the quick programs
#
# Prints the seed of a run that failed: RANDOM_MALLOC_SEED repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-20}
build=${2:-build/release}
shift $(($# < 2 ? $# : 2))
programs=("$@")
if [ ${#programs[@]} -eq 0 ]; then
  programs=(errors sizes dispatch saved grammar fuzz_smoke oracle)
fi

shim=$(mktemp -d)/random_malloc.so
trap 'rm -rf "$(dirname "$shim")"' EXIT
cc -O2 -shared -fPIC -fno-builtin -Wall -Wextra -o "$shim" tools/random_malloc.c

failed=0
for ((run = 1; run <= runs; ++run)); do
  for program in "${programs[@]}"; do
    log=$(dirname "$shim")/log
    if ! LD_PRELOAD=$shim RANDOM_MALLOC_SEED=$run \
      "$build/tests/${program}_test" --gtest_brief=1 --gtest_filter='-*Long*' >"$log" 2>&1; then
      failed=$((failed + 1))
      echo "$program: failed with RANDOM_MALLOC_SEED=$run"
      grep -E 'FAILED|Failure' "$log" | sort -u | head -5 || true
    fi
  done
done
echo "$runs runs of ${programs[*]}: $failed failures"
[ "$failed" -eq 0 ]
