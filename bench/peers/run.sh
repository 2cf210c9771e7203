#!/usr/bin/env bash
# Measures deltic beside the PyTorch fallback of transformers and writes docs/benchmarks/cpu.md and the
# numbers of README.md. Needs an idle machine, python3 with venv, and a package index that pip reaches
# (about 6 GB in build/peers the first time; PEERS_PIP_ARGS gives pip other arguments).
#   bench/peers/run.sh            measure and write
#   bench/peers/run.sh --quick    few rounds, nothing written: to see that everything works
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/peers/venv
if ! "$venv/bin/python" -c 'import torch, transformers' 2>/dev/null; then
  echo "peers: installing torch and transformers into $venv"
  python3 -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q ${PEERS_PIP_ARGS:-} torch transformers numpy
fi

tools/install_deps.sh demo
cmake --preset demo >/dev/null
cmake --build --preset demo

# Without this bound oneDNN uses AMX from CPUID alone, and on some virtual machines dies of an
# illegal instruction in torch's own bf16 products.
export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
export HF_HUB_OFFLINE=1
out=build/peers/cpu.json
"$venv/bin/python" bench/peers/fallback.py --library build/demo/src/libdeltic.so --json "$out" "$@"
case " $* " in
  *" --quick "*) bench/cpu_table.py "$out" --print ;;
  *) bench/cpu_table.py "$out" ;;
esac
