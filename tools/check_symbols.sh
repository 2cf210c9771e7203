#!/usr/bin/env bash
# Checks what libdeltic.so shows to the world: `check_symbols.sh path/to/libdeltic.so`.
# Exported are the functions of deltic.h and nothing else; the soname carries the ABI's number; the
# libraries needed are the C, C++ and OpenMP runtimes.
set -euo pipefail
library=$1
header=$(dirname "$0")/../include/deltic/deltic.h
status=0

# A long declaration has its name on the second line.
declared=$(tr '\n' ' ' <"$header" | grep -oE 'DELTIC_API [^(]*\(' | grep -oE 'deltic_[a-z0-9_]+\(' | tr -d '(' | sort -u)
exported=$(nm --dynamic --defined-only --extern-only "$library" | awk '{print $3}' | sed 's/@.*//' | sort -u)
extra=$(comm -13 <(echo "$declared") <(echo "$exported"))
lacking=$(comm -23 <(echo "$declared") <(echo "$exported"))
if [ -n "$extra" ]; then
  echo "symbols: exported but not in deltic.h:"
  head -n 20 <<<"$extra" | c++filt | sed 's/^/  /'
  status=1
fi
if [ -n "$lacking" ]; then
  echo "symbols: in deltic.h but not exported:"
  sed 's/^/  /' <<<"$lacking"
  status=1
fi

dynamic=$(readelf --dynamic "$library")
soname=$(sed -nE 's/.*\(SONAME\).*\[(.*)\]/\1/p' <<<"$dynamic")
expected=libdeltic.so.$(sed -nE 's/^#define DELTIC_ABI_VERSION ([0-9]+)$/\1/p' include/deltic/deltic.h)
if [ "$soname" != "$expected" ]; then
  echo "symbols: soname: expected $expected, got '$soname'"
  status=1
fi
while IFS= read -r needed; do
  case "$needed" in
    libc.so.6 | libm.so.6 | libpthread.so.0 | libgcc_s.so.1 | libstdc++.so.6 | libgomp.so.1 | \
      libomp.so.5 | ld-linux-x86-64.so.2) ;;
    *)
      echo "symbols: needs a library that it should not: $needed"
      status=1
      ;;
  esac
done < <(sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' <<<"$dynamic")
if grep -qE '\((RPATH|RUNPATH)\)' <<<"$dynamic"; then
  echo "symbols: carries a library path of the build"
  status=1
fi
echo "symbols: $(wc -l <<<"$exported") exported, soname $soname"
exit $status
