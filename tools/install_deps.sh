#!/usr/bin/env bash
# Installs the Debian packages a build needs and that are missing: `install_deps.sh demo|test`.
set -euo pipefail

case "${1:-}" in
  demo | test) ;;
  *)
    echo "usage: $0 demo|test" >&2
    exit 2
    ;;
esac

# What the library and the program need.
packages=(g++ cmake ninja-build libhwy-dev libcli11-dev nlohmann-json3-dev)
if [ "$1" = test ]; then
  # Tests; the consumer projects; clang for ThreadSanitizer and libFuzzer, with the OpenMP runtime
  # whose races ThreadSanitizer can tell from false ones; the checks of the sources.
  packages+=(libgtest-dev libgmock-dev pkg-config clang libomp-dev libclang-rt-dev clang-format
    binutils python3 python3-venv git)
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "deps: not a Debian system; needed are the equivalents of: ${packages[*]}"
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  # Of a package that exists for several architectures the status is printed once for each.
  case "$status" in
    installed*) ;;
    *) missing+=("$package") ;;
  esac
done

if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "deps: missing Debian packages. Install them, then run make again:" >&2
  echo "  sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi

echo "deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } \
  >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "deps: apt-get failed" >&2
  exit 1
fi
