#!/usr/bin/env bash
# Measures deltic beside the PyTorch fallback of transformers and writes docs/benchmarks/cpu.md and the
# numbers of README.md. Needs an idle machine, python3 with venv, and a package index that pip reaches
# (about 6 GB in build/peers the first time; PEERS_PIP_ARGS gives pip other arguments).
#   bench/peers/run.sh            measure and write
#   bench/peers/run.sh --quick    few rounds, nothing written: to see that everything works
#   --threads N                   threads of both (default: 2)
#   --isa avx2                    both sides without AVX-512 and AMX; a table of its own in cpu.md
set -euo pipefail
cd "$(dirname "$0")/../.."

quick='' isa='' arguments=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' bench/peers/run.sh && exit 0 ;;
    --quick) quick=1 && arguments+=("$1") && shift ;;
    --threads | --threads=*)
      threads=${1#--threads}
      if [ -z "$threads" ] && [ "$#" -gt 1 ]; then threads="=$2" && shift; fi
      if ! [[ $threads =~ ^=[1-9][0-9]*$ ]]; then
        threads=${threads#=}
        echo "run.sh: --threads: expected a number above 0, got ${threads:-none}" >&2
        exit 2
      fi
      arguments+=("--threads$threads") && shift
      ;;
    --isa | --isa=*)
      isa=${1#--isa}
      if [ -z "$isa" ] && [ "$#" -gt 1 ]; then isa="=$2" && shift; fi
      isa=${isa#=}
      if [ "$isa" != avx2 ]; then
        echo "run.sh: --isa: expected avx2, got ${isa:-none}" >&2
        exit 2
      fi
      arguments+=("--isa=$isa") && shift
      ;;
    *) echo "run.sh: expected --quick, --threads N, --isa avx2 or --help, got $1" >&2 && exit 2 ;;
  esac
done

# The page names the commit it was measured at: what is in no commit could not be found again. Pages
# themselves may have changed, an earlier run writes them.
changed=$(git status --porcelain --untracked-files=no -- . ':!docs' ':!README.md' 2>/dev/null | head -n 3)
if [ -z "$quick" ] && [ -n "$changed" ]; then
  echo "run.sh: expected sources as committed (--quick measures any), got changes:" >&2
  printf '%s\n' "$changed" >&2
  exit 2
fi

venv=build/peers/venv
if ! "$venv/bin/python" -c 'import torch, transformers' 2>/dev/null; then
  echo "peers: installing torch and transformers into $venv"
  python3 -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q ${PEERS_PIP_ARGS:-} torch transformers numpy
fi

tools/install_deps.sh demo
cmake --preset demo -DDELTIC_CUDA=OFF >/dev/null
cmake --build --preset demo

# Without this bound oneDNN uses AMX from CPUID alone, and on some virtual machines dies of an
# illegal instruction in torch's own bf16 products.
export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
export HF_HUB_OFFLINE=1
out=build/peers/cpu.json
if [ "$isa" = avx2 ]; then
  # Ours, ATen's own loops, and oneDNN's products; MKL's through its own switch.
  export DELTIC_IMPL=cpu.avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
  out=build/peers/cpu_avx2.json
fi
"$venv/bin/python" bench/peers/fallback.py --library build/demo/src/libdeltic.so --json "$out" "${arguments[@]}"
if [ -n "$quick" ]; then
  bench/cpu_table.py "$out" --print
else
  bench/cpu_table.py "$out"
fi
