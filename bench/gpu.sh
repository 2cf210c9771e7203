#!/usr/bin/env bash
# On a machine with a GPU: correctness against the oracle, sanitizers, then times; a short table last.
#   bench/gpu.sh [--build FOLDER] [--out FOLDER] [STEP...]
# FOLDER (default build/release) holds a build with DELTIC_CUDA=ON, or what `bench/gpu.sh --pack TO`
# made of one: the program, the test and the library, side by side. Steps: verify tests sanitize times
# (default: all). Results go to --out (default build/gpu): verify.json, h200.json, logs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=build/release out=build/gpu pack= steps=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    --build | --out | --pack)
      if [ "$#" -lt 2 ]; then
        echo "gpu.sh: $1: expected a folder, got none" >&2
        exit 2
      fi
      case "$1" in
        --build) build=$2 ;;
        --out) out=$2 ;;
        --pack) pack=$2 ;;
      esac
      shift 2
      ;;
    verify | tests | sanitize | times) steps+=("$1") && shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) echo "gpu.sh: expected verify, tests, sanitize or times, got $1" >&2 && exit 2 ;;
  esac
done
[ "${#steps[@]}" -gt 0 ] || steps=(verify tests sanitize times)

if [ -n "$pack" ]; then
  mkdir -p "$pack" || exit 1
  cp "$build/cli/deltic" "$build/tests/gpu_test" "$pack" &&
    cp "$(readlink -f "$build/src/libdeltic.so")" "$pack/libdeltic.so.0" &&
    strip --strip-debug "$pack"/*
  exit
fi

program=$build/deltic test=$build/gpu_test
if [ ! -x "$program" ]; then program=$build/cli/deltic test=$build/tests/gpu_test; fi
export LD_LIBRARY_PATH=$build:${LD_LIBRARY_PATH:-}
mkdir -p "$out"
summary=() status=0
# say NAME STATUS TEXT: a line of the table at the end.
say() {
  [ "$2" -eq 0 ] || status=1
  summary+=("$(printf '%-22s %-4s %s' "$1" "$([ "$2" -eq 0 ] && echo ok || echo FAIL)" "$3")")
}
wants() {
  local s
  for s in "${steps[@]}"; do [ "$s" = "$1" ] && return 0; done
  return 1
}

if wants verify; then
  "$program" verify --device cuda --json "$out/verify.json" >"$out/verify.log" 2>&1
  code=$?
  grep -E '^ *fail' "$out/verify.log" | head -n 20
  say verify "$code" "$(tail -n 1 "$out/verify.log")"
fi

if wants tests; then
  "$test" --gtest_brief=1 --gtest_filter='-*Long*' >"$out/tests.log" 2>&1
  code=$?
  grep -vE '^\[|^$|YOU HAVE' "$out/tests.log" | head -n 40
  say tests "$code" "$(grep -E 'PASSED|FAILED' "$out/tests.log" | head -n 1)"
fi

if wants sanitize; then
  # Small cases of every kernel: gates, forms, groups, empty and partial sequences, pools.
  lines="$out/small.txt"
  cat >"$lines" <<'CASES'
forward gate=channel form=bounded seqs=100,0,70 H=1 HV=2 K=128 V=128 dtype=bf16 gdtype=bf16 beta=sigmoid l2norm=1 init=1 state=vk
forward gate=head seqs=100,0,70 pad=5 H=1 HV=2 K=128 V=128 dtype=bf16 init=1
forward gate=none seqs=70,65 H=1 K=64 V=64 dtype=f16 pool=mixed
forward gate=channel form=softplus gates=softplus seqs=70,3 H=1 K=48 V=40 dtype=f32 init=1 ckpt=0,30,end
forward gate=head seqs=400 H=1 K=128 V=128 dtype=bf16 split=128
decode gate=channel seqs=1,2,0,1 H=1 HV=2 K=128 V=128 dtype=bf16 pool=mixed
kkt gate=channel seqs=70,3 H=1 K=64
scores gate=head seqs=70,3 H=1 K=64
inverse seqs=70,3
wy gate=head seqs=70 H=1 K=64 V=64
cumsum gate=channel form=softplus seqs=70 K=64
l2norm seqs=70 K=64
CASES
  for tool in memcheck racecheck initcheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" verify --device cuda --cases "$lines" \
      >"$out/$tool.log" 2>&1
    code=$?
    grep -E '^========= (Error|Invalid|Warning|Uninit|Race)' "$out/$tool.log" | sort | uniq -c | head -n 5
    say "$tool" "$code" "$(grep -E 'passed,' "$out/$tool.log" | tail -n 1); $(grep -E 'SUMMARY' "$out/$tool.log" | tail -n 1)"
  done
fi

if wants times; then
  # shellcheck disable=SC2086
  "$program" bench --device cuda --anchors bench/anchors/h200.json --json "$out/h200.json" --time 0.2 \
    ${DELTIC_GPU_SUITES:---suite kda_forward_random --suite kda_forward_slow --suite kda_forward_softplus --suite gdn_forward --suite delta_forward --suite gpu_growth --suite gpu_blocks --suite gpu_decode --suite gpu_layers} \
    >"$out/times.log" 2>&1
  code=$?
  say times "$code" "$(grep -c . "$out/times.log") lines in times.log"
  while IFS= read -r line; do summary+=("  $line"); done < <(grep -E 'geometric mean|slowest' "$out/times.log")
fi

echo
printf '%s\n' "${summary[@]}"
exit $status
