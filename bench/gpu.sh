#!/usr/bin/env bash
# On a machine with a GPU: correctness against the oracle, calls beside what else runs, Python, sanitizers, times; a short
# table last.
#   bench/gpu.sh [--build FOLDER] [--out FOLDER] [STEP...]
# FOLDER (default build/release) holds a build with DELTIC_CUDA=ON (steps python and soak: and DELTIC_BUILD_TORCH=ON),
# or what `bench/gpu.sh [--build FOLDER] --pack TO` made of one for a machine that builds nothing.
# Steps: verify tests progress python soak sanitize times (default: all). Results go to --out (default build/gpu): logs,
# verify.json, times.json and the page h200.md with h200.json; `bench/gpu_table.py OUT` writes both to docs.
# DELTIC_COMMIT names the commit where there is no git; DELTIC_GPU_SEEDS (default 1; "1 3 7", "1-5") are the draws that
# verify checks, 1-5 before a release, DELTIC_GPU_SANITIZE (default all) what sanitize runs: groups of cases (core rows
# decode drafts blocks long) and tools (memcheck racecheck initcheck); DELTIC_GPU_SUITES ("--suite NAME ...") and
# DELTIC_GPU_SECONDS (default 420) are for the times, DELTIC_IMPL as everywhere, PYTHON is the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=build/release out=build/gpu pack='' steps=()
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
    verify | tests | progress | python | soak | sanitize | times) steps+=("$1") && shift ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' bench/gpu.sh && exit 0 ;;
    *) echo "gpu.sh: expected verify, tests, progress, python, soak, sanitize or times, got $1" >&2 && exit 2 ;;
  esac
done
[ "${#steps[@]}" -gt 0 ] || steps=(verify tests progress python soak sanitize times)
python=${PYTHON:-python3}
commit=${DELTIC_COMMIT:-}
if [ -z "$commit" ] && [ -f "$build/commit" ]; then commit=$(cat "$build/commit"); fi
[ -n "$commit" ] || commit=$(git describe --always --dirty --abbrev=12 2>/dev/null) || commit=unknown

# need WHAT FILE...: the first of the files that the build has, else an error that names them.
need() {
  local what=$1 file
  shift
  for file in "$@"; do
    if [ -f "$build/$file" ]; then
      echo "$build/$file"
      return 0
    fi
  done
  file=$*
  echo "gpu.sh: --build: expected $what in $build, got no ${file// / and no }" >&2
  return 2
}
if [ ! -d "$build" ]; then
  echo "gpu.sh: --build: expected the folder of a build, got $build, which is not there" >&2
  exit 2
fi
wants() {
  local s
  for s in "${steps[@]}"; do [ "$s" = "$1" ] && return 0; done
  return 1
}

# writable OPTION FOLDER: makes the folder, and a file in it.
writable() {
  local probe
  if ! { mkdir -p "$2" && probe=$(mktemp "$2/.gpu.XXXXXX") && rm "$probe"; } 2>/dev/null; then
    echo "gpu.sh: $1: expected a folder that can be written, got $2" >&2
    return 2
  fi
}

# The package with its library in FOLDER/deltic.
lay_out_python() {
  rm -rf "$1" && mkdir -p "$1" || return 1
  cp -r python/deltic "$1/deltic" || return 1
  rm -f "$1"/deltic/*.so
  find "$1" -name __pycache__ -prune -exec rm -rf {} +
  cp "$build/bindings/torch/libdeltic_torch.so" "$1/deltic/"
}

if [ -n "$pack" ]; then
  program=$(need "the program" cli/deltic) || exit 2
  test=$(need "the GPU's tests" tests/gpu_test) || exit 2
  progress=$(need "the test of progress" tests/gpu_progress) || exit 2
  library=$(need "the library" src/libdeltic.so) || exit 2
  writable --pack "$pack" || exit 2
  cp "$program" "$test" "$progress" "$pack" || exit 1
  soname=$(basename "$(readlink "$library")") || exit 1
  cp "$library" "$pack/$soname" || exit 1
  strip --strip-debug "$pack/deltic" "$pack/gpu_test" "$pack/gpu_progress" "$pack/$soname" || exit 1
  printf '%s\n' "$commit" >"$pack/commit"
  if [ -f "$build/bindings/torch/libdeltic_torch.so" ]; then
    lay_out_python "$pack/python" || exit 1
    strip --strip-debug "$pack/python/deltic/libdeltic_torch.so" || exit 1
    "$python" -m pip install -q --no-compile --target "$pack/python/lib" pytest ||
      echo "gpu.sh: no pytest in the pack: step python needs one there" >&2
  else
    echo "gpu.sh: no libdeltic_torch.so in $build (DELTIC_BUILD_TORCH=ON): no step python" >&2
  fi
  du -sh "$pack"
  exit 0
fi

# A pack's file, or that of the build itself. What is missing is said before a minute is spent.
program=$(need "the program" deltic cli/deltic) || exit 2
if wants tests; then test=$(need "the GPU's tests" gpu_test tests/gpu_test) || exit 2; fi
if wants progress; then
  progress=$(need "the test of progress" gpu_progress tests/gpu_progress) || exit 2
fi
if wants python || wants soak; then
  need "the torch operators (DELTIC_BUILD_TORCH=ON; steps other than python and soak go without)" \
    python/deltic/libdeltic_torch.so bindings/torch/libdeltic_torch.so >/dev/null || exit 2
fi
seconds=${DELTIC_GPU_SECONDS:-420}
if wants times && ! [[ $seconds =~ ^[0-9]+([.][0-9]+)?$ ]]; then
  echo "gpu.sh: DELTIC_GPU_SECONDS: expected a number of seconds, got $seconds" >&2
  exit 2
fi
seeds=()
if wants verify; then
  for seed in ${DELTIC_GPU_SEEDS:-1}; do
    if [[ $seed =~ ^([0-9]{1,9})-([0-9]{1,9})$ ]] && ((10#${BASH_REMATCH[1]} <= 10#${BASH_REMATCH[2]})); then
      for ((i = 10#${BASH_REMATCH[1]}; i <= 10#${BASH_REMATCH[2]}; i++)); do seeds+=("$i"); done
    elif [[ $seed =~ ^[0-9]{1,9}$ ]]; then
      seeds+=("$seed")
    else
      echo "gpu.sh: DELTIC_GPU_SEEDS: expected numbers and ranges as 1-5, got $seed" >&2
      exit 2
    fi
  done
  [ "${#seeds[@]}" -gt 0 ] || seeds=(1)
fi
groups=() tools=()
if wants sanitize; then
  for word in ${DELTIC_GPU_SANITIZE:-}; do
    case "$word" in
      core | rows | decode | drafts | blocks | long) groups+=("$word") ;;
      memcheck | racecheck | initcheck) tools+=("$word") ;;
      *)
        echo "gpu.sh: DELTIC_GPU_SANITIZE: expected core, rows, decode, drafts, blocks, long, memcheck, racecheck or" \
          "initcheck, got $word" >&2
        exit 2
        ;;
    esac
  done
  [ "${#groups[@]}" -gt 0 ] || groups=(core rows decode drafts blocks long)
  [ "${#tools[@]}" -gt 0 ] || tools=(memcheck racecheck initcheck)
fi
export LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
writable --out "$out" || exit 2
# What an earlier run left of these steps. The page's commit is that of its times: run.json goes with them.
for step in "${steps[@]}"; do
  case "$step" in
    sanitize) old=(small.txt memcheck.log racecheck.log initcheck.log) ;;
    times) old=(times.json times.log run.json table.log h200.md h200.json) ;;
    verify) old=(verify.json verify.log) && rm -f "$out"/verify.[0-9]*.json ;;
    *) old=("$step.json" "$step.log") ;;
  esac
  rm -f "${old[@]/#/$out/}" || exit 1
done
if wants times; then
  printf '{"commit": "%s", "command": "bench/gpu.sh %s"}\n' "$commit" "${steps[*]}" >"$out/run.json"
fi
summary=() status=0
# say NAME STATUS TEXT: a line of the table at the end.
say() {
  [ "$2" -eq 0 ] || status=1
  summary+=("$(printf '%-22s %-4s %s' "$1" "$([ "$2" -eq 0 ] && echo ok || echo FAIL)" "$3")")
}
# last LOG: the program's own error, else the last line with text in it.
last() {
  local line
  line=$(grep -E '^deltic: ' "$1" | tail -n 1)
  [ -n "$line" ] || line=$(grep -E '[^[:space:]]' "$1" | tail -n 1)
  echo "${line:-no output}"
}

if wants verify; then
  code=0 passed=0 failed=0 skipped=0
  : >"$out/verify.log"
  for seed in "${seeds[@]}"; do
    json=$out/verify.json
    [ "$seed" = "${seeds[0]}" ] || json=$out/verify.$seed.json
    echo "seed $seed" >>"$out/verify.log"
    "$program" verify --device cuda --seed "$seed" --json "$json" >"$out/verify.one" 2>&1 || code=1
    cat "$out/verify.one" >>"$out/verify.log"
    grep -E '^FAIL ' -A 1 "$out/verify.one" | head -n 20
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out/verify.one" | tail -n 1)
    if [ -z "$line" ]; then  # it died
      code=1 text="seed $seed: $(last "$out/verify.one")"
      break
    fi
    read -r more _ bad _ without _ <<<"$line"
    passed=$((passed + more)) failed=$((failed + bad)) skipped=$((skipped + without))
    text="$passed passed, $failed failed, $skipped skipped, seeds ${seeds[*]}"
  done
  rm -f "$out/verify.one"
  echo "$text" >>"$out/verify.log"
  say verify "$code" "$text"
fi

if wants tests; then
  "$test" --gtest_brief=1 --gtest_filter='-*Long*' >"$out/tests.log" 2>&1
  code=$?
  # A skip is two lines: its place, its reason.
  awk '/: Skipped$/ { getline; next } !/^\[|^$|YOU HAVE|^Running main/' "$out/tests.log" | head -n 40
  text=$(grep -E 'PASSED|FAILED' "$out/tests.log" | tail -n 1)
  [ -n "$text" ] || text=$(last "$out/tests.log")  # it died
  skipped=$(sed -n 's/^\[  SKIPPED \] \([0-9]* tests\{0,1\}\).*/\1/p' "$out/tests.log" | head -n 1)
  if [ -n "$skipped" ]; then  # a GPU test was skipped: there is no GPU
    why=$(awk '/: Skipped$/ { getline; if (!seen[$0]++) { printf "%s%s", sep, $0; sep = "; " } }' "$out/tests.log")
    [ "$code" -eq 0 ] && text='' || text="$text; "
    text+="$skipped skipped: $why"
    code=1
  fi
  say tests "$code" "$text"
fi

if wants progress; then
  # As much as all scenarios may take: each has a limit of its own, which names it.
  timeout -k 5 660 "$progress" >"$out/progress.log" 2>&1
  code=$?
  cat "$out/progress.log"
  say progress "$code" "$(last "$out/progress.log")"
fi

if wants python || wants soak; then
  place=$build/python
  [ -f "$place/deltic/libdeltic_torch.so" ] || { place=$out/python && lay_out_python "$place"; }
fi
# in_python SECONDS ARGUMENTS...: without LD_LIBRARY_PATH, as a user's process: the package brings what it needs.
in_python() {
  env -u LD_LIBRARY_PATH PYTHONPATH="$place:$place/lib" PYTHONDONTWRITEBYTECODE=1 timeout -k 5 "$1" "$python" "${@:2}"
}
if wants python; then
  # Every file with tests of CUDA tensors, of two of them those tests alone; soak has a step of its own.
  mapfile -t files < <(grep -lE 'cuda\.is_available|needs_gpu' tests/python/test_*.py | grep -vE '_(soak|gpu_table)\.py$')
  in_python 480 -m pytest -q -rs -p no:cacheprovider -k '(not test_examples and not test_transformers) or on_a_gpu' \
    "${files[@]}" tests/python/test_direct_refusals.py >"$out/python.log" 2>&1
  code=$?
  grep -E '^(FAILED|ERROR|E  )|No module' "$out/python.log" | head -n 20
  grep -q ' passed' "$out/python.log" || code=1  # all skipped: nothing was shown
  say python "$code" "$(tail -n 1 "$out/python.log")"
fi

if wants soak; then
  in_python 270 tests/python/soak.py --steps 10000 --seconds 240 >"$out/soak.log" 2>&1
  code=$?
  grep -E 'steps, .* tokens of' "$out/soak.log"
  say soak "$code" "$(last "$out/soak.log")"
fi

if wants sanitize; then
  # Small cases of every kernel, by groups: gates, forms, groups, empty and partial sequences, pools. The sizes of
  # `decode` are the least with which an H200 (132 SMs) takes the kernel (sm80/decode/launch.cu); those that it
  # takes for little work are in `core`. The last two of `long` fill one: fused CTAs, and chains that share CTAs.
  lines="$out/small.txt"
  awk -v wanted=" ${groups[*]} " '/^# / { on = index(wanted, " " $2 " ") > 0 } on' >"$lines" <<'CASES'
# core

forward gate=channel form=bounded seqs=100,0,70 H=1 HV=2 K=128 V=128 dtype=bf16 gdtype=bf16 beta=sigmoid l2norm=1 init=1 state=vk
forward gate=head seqs=100,0,70 pad=5 H=1 HV=2 K=128 V=128 dtype=bf16 init=1
forward gate=none seqs=70,65 H=1 K=64 V=64 dtype=f16 pool=mixed
forward gate=channel form=softplus gates=softplus seqs=70,3 H=1 K=48 V=40 dtype=f32 init=1 ckpt=0,30,end
forward gate=head seqs=400 H=1 K=128 V=128 dtype=bf16 split=128
decode gate=channel seqs=1,2,0,1 H=1 HV=2 K=128 V=128 dtype=bf16 pool=mixed
backward gate=channel form=softplus seqs=70,3 H=1 HV=2 K=48 V=40 dtype=f32 init=1 save=none
backward gate=head seqs=100 H=1 K=128 V=128 dtype=bf16 l2norm=1 save=none
backward gate=channel form=softplus seqs=130,3 pad=5 H=1 HV=2 K=64 V=64 dtype=bf16 init=1 state=vk
backward gate=head seqs=100,0,70 H=1 HV=2 K=128 V=64 dtype=f16 dfinal=1
decode gate=head seqs=1,9,0,3 pad=2 H=1 HV=2 K=128 V=136 dtype=bf16 pool=tokens state=vk sdtype=bf16
decode gate=channel form=bounded dense=2x3 H=1 HV=2 K=64 V=40 dtype=f32 init=1 sdtype=bf16
decode gate=none dense=2x2 H=1 K=128 V=100 dtype=f16 init=1 final=inplace state=vk
decode gate=head dense=2x2 H=1 K=96 V=40 pool=mixed sdtype=bf16
kkt gate=channel seqs=70,3 H=1 K=64
scores gate=head seqs=70,3 H=1 K=64
inverse seqs=70,3
wy gate=head seqs=70 H=1 K=64 V=64
cumsum gate=channel form=softplus seqs=70 K=64
l2norm seqs=70 K=64
# rows
conv seqs=70,0,3 pad=2 D=40 W=4 dtype=bf16 init=1 act=silu ckpt=0,2,end
conv dense=3x1 D=40 W=4 pool=inplace dtype=bf16 sdtype=bf16 wdtype=bf16 act=silu
conv dense=3x1 D=33 W=5 pool=mixed dtype=f32
conv dense=3x4 D=40 W=4 S=7 pool=drafts null=0 dtype=bf16 sdtype=bf16 wdtype=bf16 act=silu
conv seqs=1,5,0,2 D=40 W=4 S=7 pool=drafts state=vk dtype=f16 sdtype=f16
conv_backward seqs=70,0,3 pad=2 D=40 W=4 dtype=bf16 init=1 act=silu
conv_backward dense=2x9 D=33 W=3 dtype=f32
rmsnorm seqs=9,0,3 pad=2 H=3 K=128 act=silu dtype=bf16 odtype=bf16
rmsnorm dense=2x3 H=2 K=33 act=sigmoid
rmsnorm_backward seqs=9,0,3 pad=2 H=3 K=128 act=silu dtype=bf16 odtype=bf16
rmsnorm_backward dense=2x3 H=2 K=1024 act=silu
rmsnorm_backward dense=2x3 H=2 K=33
move dense=3x1 HV=2 K=64 V=40 pool=mixed layers=2 sdtype=f32
move dense=3x1 HV=2 K=64 V=40 pool=move writepool=1 transpose=1 sdtype=bf16 odtype=f32
move dense=3x1 HV=2 K=33 V=5 pool=move writepool=1 transpose=1 sdtype=bf16 odtype=bf16
# decode
decode gate=head dense=44x2 H=1 HV=16 K=128 V=8 dtype=bf16 init=1 state=vk sdtype=bf16
decode gate=head dense=44x5 H=1 HV=16 K=64 V=8 dtype=bf16 init=1 final=0 state=vk
decode gate=channel dense=33x2 H=1 HV=32 K=128 V=8 dtype=bf16 init=1 state=vk sdtype=f16
decode gate=head dense=32x1 H=1 HV=16 K=64 V=8 dtype=bf16 pool=inplace sdtype=bf16
decode gate=head dense=44x2 H=1 HV=16 K=64 V=8 dtype=bf16 init=1 state=vk
decode gate=channel dense=33x1 H=1 HV=16 K=64 V=8 dtype=bf16 init=1 state=vk
decode gate=head dense=25x1 H=1 HV=16 K=64 V=8 dtype=bf16 init=1 state=vk
decode gate=head dense=2x1 H=1 HV=2 K=128 V=40 dtype=bf16 init=1 state=vk
decode gate=channel dense=2x1 H=1 HV=2 K=128 V=40 dtype=bf16 init=1 state=vk sdtype=bf16
decode gate=head dense=2x1 H=1 HV=2 K=64 V=40 dtype=bf16 pool=inplace sdtype=f16
step gate=head form=softplus dense=3x1 H=1 HV=2 K=128 V=128 l2norm=1 act=silu norm=silu dtype=bf16 wdtype=bf16 odtype=bf16 pool=mixed null=0 state=vk
step gate=channel form=softplus dense=2x4 H=1 HV=2 K=64 V=40 l2norm=1 act=silu norm=sigmoid dtype=bf16 pool=drafts sdtype=bf16
step gate=none seqs=2,0,5 pad=1 H=1 HV=2 K=33 V=24 l2norm=1 norm=off init=1
# drafts
decode gate=head seqs=3,0,5 H=1 HV=2 K=128 V=40 dtype=bf16 pool=drafts tree=1 null=0 state=vk sdtype=bf16
decode gate=channel seqs=3,0,5 H=1 HV=2 K=64 V=40 dtype=f32 pool=drafts tree=1
decode gate=head seqs=1,0,3 H=1 HV=2 K=128 V=40 dtype=bf16 pool=mixed state=vk sdtype=bf16 stochastic=1
decode gate=channel seqs=1,0,3 H=1 HV=2 K=64 V=40 dtype=bf16 pool=mixed sdtype=f16 stochastic=1
decode record=1 gate=channel seqs=3,0,5 pad=1 H=1 HV=2 K=128 V=40 dtype=bf16 pool=drafts tree=1 sdtype=bf16
decode record=1 gate=head dense=2x3 H=1 HV=2 K=64 V=40 init=1 state=vk
commit gate=channel dense=3x5 HV=2 K=128 V=40 layers=2 tree=1 pool=inplace sdtype=bf16
commit gate=head dense=3x5 HV=2 K=64 V=40 pool=mixed state=vk
# blocks
scores_inverse gate=channel seqs=70,3 H=1 K=128 dtype=f16
scores_inverse gate=head seqs=70,3 H=1 HV=2 K=64 dtype=bf16
kkt gate=head seqs=70,3 H=1 K=128 dtype=bf16
scores gate=channel seqs=70,3 H=1 K=40 dtype=bf16
inverse seqs=70,3 chunk=16 dtype=bf16 odtype=bf16
wy gate=channel seqs=70,3 H=1 K=40 V=24 dtype=bf16
gate gate=head form=softplus seqs=70,3 pad=2
l2norm seqs=70,3 pad=2 K=64 dtype=bf16 rstd=1
cumsum_backward gate=channel form=softplus seqs=70,3 pad=2 HV=2 K=40
gate_backward gate=head form=bounded seqs=70,3 pad=2 HV=2
l2norm_backward seqs=70,3 pad=2 H=2 K=40 dtype=bf16
kkt_backward gate=head seqs=70,3 pad=2 H=1 HV=2 K=40 dtype=bf16
kkt_backward gate=channel seqs=70,3 H=1 HV=2 K=70
scores_backward gate=none seqs=70,3 H=1 HV=2 K=40
scores_backward gate=channel seqs=70,3 H=1 HV=2 K=40 dtype=f16
inverse_backward seqs=70,3 pad=2 HV=2 result=0
wy_backward gate=head seqs=70,3 pad=2 H=1 HV=2 K=40 V=24 parts=u,kg,qg
wy_backward gate=channel chunk=16 seqs=20,3 H=1 HV=2 K=40 V=24 parts=u,kg,qg
# long
forward gate=channel seqs=130,3 H=1 K=128 V=128 dtype=bf16 gdtype=bf16 init=1 ckpt=0,30,64,end
forward gate=head seqs=130,3 H=1 HV=2 K=64 V=64 dtype=bf16 pool=mixed sdtype=f16 ckpt=64,end
forward gate=channel seqs=300,65 H=1 K=64 V=64 dtype=bf16 init=1 split=128
forward gate=head seqs=70,20 H=1 HV=2 K=128 V=128 dtype=bf16 init=1 recurrent=64,end split=off
forward gate=channel seqs=70,20 H=1 K=64 V=64 dtype=bf16 pool=inplace sdtype=f16 recurrent=10,0 split=off
backward gate=channel gates=slow seqs=200,65 H=1 K=128 V=128 dtype=bf16 l2norm=1 init=1 save=none split=128
backward gate=head gates=slow seqs=200,65 H=1 HV=2 K=64 V=64 dtype=bf16 init=1 save=states split=64
backward gate=none seqs=200 H=1 K=64 V=128 dtype=f16 save=none split=128
backward gate=head form=softplus seqs=70,3 pad=2 H=1 HV=2 K=64 V=64 dtype=f16 sdtype=f16 init=1 save=all
forward gate=head seqs=3,70,0,64 H=1 HV=34 K=64 V=72 dtype=bf16 init=1
backward gate=channel dense=1x65 H=48 K=64 V=128 dtype=bf16 save=none
CASES
  if ! command -v compute-sanitizer >/dev/null; then
    say sanitize 1 "compute-sanitizer was not found in PATH; it comes with the CUDA toolkit"
    tools=()
  fi
  for tool in "${tools[@]}"; do
    begin=$SECONDS
    timeout -k 5 200 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$program" verify --device cuda --cases "$lines" >"$out/$tool.log" 2>&1
    code=$?
    grep -E '^========= (Error|Invalid|Warning|Uninit|Race)' "$out/$tool.log" | sort | uniq -c | head -n 5
    passed=$(grep -E 'passed,' "$out/$tool.log" | tail -n 1)
    text="${passed:-$(last "$out/$tool.log")}; $(grep -E 'SUMMARY' "$out/$tool.log" | tail -n 1)"
    say "$tool" "$code" "$text; ${groups[*]}; $((SECONDS - begin)) s"
  done
fi

if wants times; then
  suites=()
  for suite in kda_forward_random kda_forward_slow kda_forward_softplus gdn_forward delta_forward growth \
    kda_backward gdn_backward train neighbours blocks decode decode_tokens step places layers options; do
    suites+=(--suite "$suite")
  done
  if [ -n "${DELTIC_GPU_SUITES:-}" ]; then read -r -a suites <<<"$DELTIC_GPU_SUITES"; fi
  begin=$SECONDS
  timeout -k 5 "$seconds" "$program" bench --device cuda \
    --anchors bench/anchors/h200.json --json "$out/times.json" --time 0.15 "${suites[@]}" \
    >"$out/times.log" 2>&1
  code=$?
  grep -E '^ *(fail|skip)  ' -A 1 "$out/times.log" | head -n 20
  text="$((SECONDS - begin)) s"
  if [ -f "$out/times.json" ]; then
    text+=", $(grep -c '"median_ms"' "$out/times.json") rows with a time"
  fi
  failed=$(grep -cE '^ *fail  ' "$out/times.log")
  case "$code" in
    0) ;;
    124 | 137) text+=", stopped: longer than DELTIC_GPU_SECONDS ($seconds s)" ;;
    *) [ "$failed" -gt 0 ] && text+=", $failed failed" || text+=", $(last "$out/times.log")" ;;
  esac
  say times "$code" "$text"
  while IFS= read -r line; do summary+=("  $line"); done < <(grep -E 'geometric mean|slowest' "$out/times.log")
  if [ "$code" -eq 0 ]; then
    "$python" bench/gpu_table.py "$out" --to "$out" >"$out/table.log" 2>&1
    say table $? "$(tail -n 1 "$out/table.log")"
  else
    summary+=("table skipped: times failed")
  fi
fi

echo
printf '%s\n' "${summary[@]}"
exit $status
