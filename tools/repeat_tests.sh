#!/usr/bin/env bash
# Runs test programs again and again with a malloc that puts every block somewhere else and fills it
# with another byte: a test that depends on where the allocator put things fails in some run.
#
#   tools/repeat_tests.sh [RUNS [BUILD [PROGRAM...]]]     20, build/release, all that ctest calls quick
#
# A line per program. Prints the seed of a run that failed: RANDOM_MALLOC_SEED repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-20}
build=${2:-build/release}
shift $(($# < 2 ? $# : 2))
programs=("$@")

# PROGRAM and the filter of its quick tests, each program once, which ctest may have in parts. Of one
# that is not built there is a name alone: `-` goes before it.
quick_programs() {
  ctest --test-dir "$build" -L '^quick$' --show-only=json-v1 | python3 -c '
import json, pathlib, sys
seen = {}
for test in json.load(sys.stdin)["tests"]:
    if "command" not in test:
        seen["- " + test["name"]] = ""
        continue
    program, *words = test["command"]
    path = pathlib.Path(program)
    if path.parent.name == "tests" and path.name.endswith("_test"):
        seen[path.name.removesuffix("_test")] = next(
            (word for word in words if word.startswith("--gtest_filter=")), "")
print(*(f"{name} {words}".strip() for name, words in seen.items()), sep="\n")'
}

if [ ! -f "$build/tests/CTestTestfile.cmake" ]; then
  echo "repeat_tests: BUILD: expected a configured build with tests, got $build" >&2
  exit 2
fi
declare -A filters
not_built=()
if [ ${#programs[@]} -eq 0 ]; then
  while read -r program filter; do
    if [ "$program" = - ]; then
      not_built+=("$filter")
    else
      programs+=("$program")
      filters[$program]=$filter
    fi
  done < <(quick_programs)
fi
for program in "${programs[@]}"; do
  if [ ! -x "$build/tests/${program}_test" ]; then
    echo "repeat_tests: PROGRAM: expected one that is built in $build/tests, got $program" >&2
    exit 2
  fi
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cc -O2 -shared -fPIC -fno-builtin -Wall -Wextra -o "$folder/random_malloc.so" tools/random_malloc.c

failed=0
for program in "${programs[@]}"; do
  begin=$SECONDS of_program=0
  for ((run = 1; run <= runs; ++run)); do
    if ! LD_PRELOAD=$folder/random_malloc.so RANDOM_MALLOC_SEED=$run "$build/tests/${program}_test" \
      --gtest_brief=1 "${filters[$program]:---gtest_filter=-*Long*}" >"$folder/log" 2>&1; then
      of_program=$((of_program + 1))
      echo "$program: failed with RANDOM_MALLOC_SEED=$run"
      grep -E 'FAILED|Failure' "$folder/log" | sort -u | head -5 || true
    fi
  done
  echo "$program: $runs runs, $of_program failures, $((SECONDS - begin)) s"
  failed=$((failed + of_program))
done
[ ${#not_built[@]} -eq 0 ] || echo "not built: ${not_built[*]}"
echo "${#programs[@]} programs, $runs runs each: $failed failures"
[ "$failed" -eq 0 ]
