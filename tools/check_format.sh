#!/usr/bin/env bash
# Checks the format of C, C++ and Python sources: `check_format.sh [--fix] [FILE...]`. With --fix
# rewrites them. Without files: all of the project.
set -euo pipefail
cd "$(dirname "$0")/.."
fix=
if [ "${1:-}" = --fix ]; then
  fix=--fix
  shift
fi
if [ "$#" -eq 0 ]; then
  mapfile -t files < <(tools/list_files.sh)
else
  files=("$@")
fi
sources=() scripts=()
for file in "${files[@]}"; do
  case "$file" in
    *.h | *.hpp | *.c | *.cpp | *.cu | *.cuh) sources+=("$file") ;;
    *.py) scripts+=("$file") ;;
  esac
done

# Other versions lay out a few lines differently, so one version is the judge: Debian 12's.
kClangFormat=14
kRuff=0.17.4

status=0
clang_format=clang-format
if command -v "clang-format-$kClangFormat" >/dev/null; then clang_format=clang-format-$kClangFormat; fi
version=$("$clang_format" --version | sed -E 's/.*version ([0-9]+)\..*/\1/')
if [ "${#sources[@]}" -eq 0 ]; then
  :
elif [ "$version" != "$kClangFormat" ]; then
  echo "format: C and C++ not checked: needs clang-format $kClangFormat, found $version"
elif [ "$fix" = --fix ]; then
  "$clang_format" -i "${sources[@]}"
else
  for source in "${sources[@]}"; do
    # The first lines of the difference say enough; `make format` does the rest.
    if ! difference=$("$clang_format" "$source" | diff -u --label "$source" --label formatted "$source" -); then
      head -n 12 <<<"$difference"
      status=1
    fi
  done
  echo "format: ${#sources[@]} C and C++ files looked at"
fi

if [ "${#scripts[@]}" -gt 0 ]; then
  ruff=.venv/bin/ruff
  if ! "$ruff" --version 2>/dev/null | grep -qx "ruff $kRuff"; then
    { python3 -m venv .venv && .venv/bin/pip install -q "ruff==$kRuff"; } >/dev/null 2>&1 || true
  fi
  if "$ruff" --version >/dev/null 2>&1; then
    if [ "$fix" = --fix ]; then
      "$ruff" check -q --output-format=concise --fix "${scripts[@]}" || status=1
      "$ruff" format -q "${scripts[@]}"
    else
      "$ruff" check -q --output-format=concise "${scripts[@]}" || status=1
      "$ruff" format --check -q "${scripts[@]}" || status=1
      echo "format: ${#scripts[@]} Python files looked at with ruff"
    fi
  else
    # No package index in reach: at least nothing that does not parse.
    for script in "${scripts[@]}"; do
      python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$script" || status=1
    done
    echo "format: ${#scripts[@]} Python files parsed (ruff is not installed and cannot be)"
  fi
fi
exit $status
