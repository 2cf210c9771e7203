#!/usr/bin/env bash
# Builds the wheel, gives it the lowest manylinux tag that its symbols allow, checks it (tools/check_wheel.py,
# and auditwheel where the package index has it), installs it into an empty environment and runs it there,
# outside of the sources. The last line is the wheel's path.
#   tools/make_wheel.sh               everything
#   tools/make_wheel.sh --build-only  without the empty environment
# Says what it is at and how far: compiling GPU code takes minutes.
# DELTIC_PYTHON_VENV names an environment that has torch; otherwise torch comes from the package index.
# DELTIC_PYTHON_CUDA: ON, OFF, or AUTO (where nvcc is found; the default).
# DELTIC_CUDA_ARCHS: which GPUs get code, as cmake's; all by default.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
build_only=
case "${1:-}" in
  '') ;;
  --build-only) build_only=1 ;;
  *) echo "make_wheel.sh: expected --build-only or nothing, got $1" >&2 && exit 2 ;;
esac

venv=${DELTIC_PYTHON_VENV:-$root/build/python/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
has() { "$1/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$2') is None)" 2>/dev/null; }
for package in torch scikit_build_core; do
  if ! has "$venv" "$package"; then
    echo "wheel: installing $package" >&2
    # shellcheck disable=SC2086
    "$venv/bin/pip" install -q ${DELTIC_PIP_ARGS:-} "${package//_/-}"
  fi
done

# One build folder for every run: only what changed is compiled again.
wheels=$root/build/python/wheels
rm -rf "$wheels"
log=$root/build/python/wheel.log
mkdir -p "$root/build/python"
echo "wheel: building; the whole output goes to build/python/wheel.log" >&2
if ! "$venv/bin/pip" wheel -v --no-build-isolation --no-deps -w "$wheels" \
  -C cmake.define.DELTIC_CUDA="${DELTIC_PYTHON_CUDA:-AUTO}" \
  -C cmake.define.DELTIC_CUDA_ARCHS="${DELTIC_CUDA_ARCHS:-all}" \
  -C cmake.define.DELTIC_TORCH_PORTABLE=ON . 2>&1 |
  "$venv/bin/python" tools/build_progress.py "$log" >&2; then
  tail -n 40 "$log" >&2
  echo "wheel: not built, see the lines above" >&2
  exit 1
fi
wheel=$("$venv/bin/python" tools/wheel_tag.py --write "$(ls "$wheels"/deltic-*.whl)")
"$venv/bin/python" tools/check_wheel.py "$wheel" >&2
if [ -n "$build_only" ]; then
  echo "$wheel"
  exit 0
fi

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$venv/bin/python" -m venv "$place/venv"
python=$place/venv/bin/python
# An old setuptools comes with some Pythons' venv; torch asks for one of its own.
"$place/venv/bin/pip" uninstall -q -y setuptools 2>/dev/null || true
cp tools/wheel_smoke.py "$place"
cd "$place"

# A second judge of the tag, by the symbols alone: libtorch_cpu, which torch brings, is in no manylinux.
# shellcheck disable=SC2086
if "$python" -m venv "$place/judge" && "$place/judge/bin/pip" install -q ${DELTIC_PIP_ARGS:-} auditwheel; then
  "$place/judge/bin/python" -m auditwheel show --json "$wheel" >verdict.json 2>/dev/null
  "$python" - "$wheel" <<'PYTHON' >&2
import json, re, sys
verdict = json.load(open("verdict.json"))["sym_tag"]
least, said = (int(re.search(r"manylinux_2_(\d+)_", text)[1]) for text in (verdict, sys.argv[1]))
if least > said:
    sys.exit(f"wheel: expected auditwheel to say manylinux_2_{said} or older, got {verdict}")
print(f"wheel: auditwheel says {verdict}, the tag manylinux_2_{said}")
PYTHON
else
  echo "wheel: auditwheel not installed: its verdict is missing" >&2
fi

if [ -n "${DELTIC_PYTHON_VENV:-}" ]; then
  # torch and what it needs, seen from there; of deltic itself nothing may be there.
  if has "$venv" deltic; then
    echo "wheel: expected an environment without deltic, got $venv" >&2
    exit 1
  fi
  "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_another.pth"
else
  # shellcheck disable=SC2086
  "$place/venv/bin/pip" install -q ${DELTIC_PIP_ARGS:-} torch
fi
"$place/venv/bin/pip" install -q --no-deps "$wheel"
"$place/venv/bin/pip" check >&2
env -u PYTHONPATH ONEDNN_MAX_CPU_ISA="${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}" "$python" wheel_smoke.py >&2
echo "$wheel"
