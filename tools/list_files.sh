#!/usr/bin/env bash
# Prints the project's own files, one per line: what git tracks or would track; without git, all but
# build folders. Arguments are git path patterns such as '*.cpp'.
set -euo pipefail
cd "$(dirname "$0")/.."

if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  # A tracked file that was deleted in the working tree is still listed: drop it.
  git ls-files --cached --others --exclude-standard -- "$@" | sort -u |
    while IFS= read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done
else
  names=()
  for pattern in "$@"; do
    names+=(${names[@]:+-o} -path "*/$pattern")
  done
  [ "${#names[@]}" -gt 0 ] || names=(-true)
  find . \( -name .git -o -name build -o -name .venv -o -name .cache -o -name __pycache__ \) -prune \
    -o -type f \( "${names[@]}" \) -print | sed 's|^\./||' | sort
fi
