#!/usr/bin/env bash
# Checks the types, builds the wheel, installs it into an environment of its own outside of the
# sources, and runs the Python tests there. torch comes from the package index the first time (about
# 5 GB, not counted).
#   tools/test_python.sh [PYTEST ARGUMENTS...]
# DELTIC_PYTHON_VENV names another environment, for example one that has torch already.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

venv=${DELTIC_PYTHON_VENV:-$root/build/python/venv}
python=$venv/bin/python
if [ ! -x "$python" ]; then
  python3 -m venv "$venv"
fi
has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }
for package in torch numpy pytest hypothesis mypy scikit_build_core; do
  if ! has "$package"; then
    echo "python: installing $package"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install -q ${DELTIC_PIP_ARGS:-} "${package//_/-}"
  fi
done

# What deltic.fla is compared with, and what deltic.integrations puts on the operators. The versions
# are those the tests were written with. flash-linear-attention's operators need triton, which comes
# with torch where there is one; its layers and models need transformers. Without any of these the
# tests that need it are skipped.
if ! has transformers; then
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q ${DELTIC_PIP_ARGS:-} "transformers==5.22.2" ||
    echo "python: transformers not installed: its models are not tested"
fi
if ! has fla.ops || ! has fla.layers; then
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --no-deps ${DELTIC_PIP_ARGS:-} \
    "fla-core==0.6.0" "flash-linear-attention==0.6.0" einops ||
    echo "python: flash-linear-attention not installed: no comparison with it"
fi

# For the picture that an example draws; without it the example's text about that is tested.
if ! has matplotlib; then
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q ${DELTIC_PIP_ARGS:-} matplotlib || echo "python: matplotlib not installed"
fi

# Types, as pyproject.toml says how strictly; torch's are those of the environment.
"$python" -m mypy --cache-dir build/python/mypy

# Without GPU code unless DELTIC_PYTHON_CUDA=ON: these tests run on the CPU, the release build compiles it.
wheel=$(DELTIC_PYTHON_VENV=$venv DELTIC_PYTHON_CUDA=${DELTIC_PYTHON_CUDA:-OFF} tools/make_wheel.sh --build-only)

# Outside of the tree, so that nothing of the sources can be imported by accident.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$venv/bin/pip" install -q --no-deps --target "$place/site" "$wheel"
mkdir "$place/tests"
cp -r tests/python tests/cases tests/gpu_test.cpp "$place/tests"  # whose words a test of the page reads
cp -r docs bench examples hub tools CITATION.cff LICENSE ./*.md "$place"
cd "$place"
# oneDNN uses AMX from CPUID alone, and on some virtual machines dies of an illegal instruction in
# torch's own bf16 products.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
# torch's OpenMP threads would spin while they wait: beside other busy processes the tests of the layers
# took 72 s, now 10.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export PYTHONPATH=$place/site PYTHONDONTWRITEBYTECODE=1
# What the overhead of calls is measured against, where the release build is there.
export DELTIC_LIBRARY=${DELTIC_LIBRARY:-$root/build/release/src/libdeltic.so}
"$python" -m pytest -q -p no:cacheprovider tests/python "$@"
