#!/usr/bin/env python3
"""Builds deltic as a kernel repository for Hugging Face's hub, in build/hub/deltic, and checks it.

  tools/make_hub.py                 builds the variant of this machine
  DELTIC_PYTHON_VENV=FOLDER         an environment that has torch (default: build/python/venv)
  DELTIC_PYTHON_CUDA=ON|OFF|AUTO    with GPU code or not (default: where nvcc is found)

Variants of other machines stay in the folder. The operators' namespace carries a digest of the
sources, so that several versions can be loaded into one process.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import check_hub  # noqa: E402

PACKAGE = ROOT / "python" / "deltic"
TARGET = ROOT / "build" / "hub" / "deltic"
# What a hub kernel may not have: imports of more than torch, layers with state, programs.
LEFT_OUT = ("integrations", "layers", "__main__.py", "__pycache__")


def digest() -> str:
    """Ten letters that change with every source."""
    listed = subprocess.run(
        [ROOT / "tools" / "list_files.sh", "src", "include", "bindings", "python", "hub"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    found = hashlib.sha256()
    for name in listed:
        found.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return found.hexdigest()[:10]


def python_of() -> Path:
    """The interpreter of the environment that has torch."""
    venv = Path(os.environ.get("DELTIC_PYTHON_VENV") or ROOT / "build" / "python" / "venv")
    if not (venv / "bin" / "python").exists():
        sys.exit(f"hub: expected an environment with torch in {venv}, got none: run `make wheel`")
    return venv / "bin" / "python"


def build(namespace: str) -> tuple[Path, str | None]:
    """The library, and the CUDA version that it was built with."""
    folder = ROOT / "build" / "hub" / "cmake"
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "DELTIC_BUILD_TORCH": "ON",
        "DELTIC_BUILD_CLI": "OFF",
        "DELTIC_BUILD_TESTS": "OFF",
        "BUILD_SHARED_LIBS": "OFF",
        "DELTIC_CUDA": os.environ.get("DELTIC_PYTHON_CUDA", "AUTO"),
        "DELTIC_TORCH_NAMESPACE": namespace,
        "DELTIC_TORCH_PORTABLE": "ON",
        "Python_EXECUTABLE": str(python_of()),
    }
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "deltic_torch"], check=True)
    cache = (folder / "CMakeCache.txt").read_text()
    cuda = re.search(r"^CMAKE_CUDA_COMPILER_VERSION.*?=(\d+)\.(\d+)", cache, re.MULTILINE)
    if cuda is None:
        for path in folder.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
            said = r'CMAKE_CUDA_COMPILER_VERSION "(\d+)\.(\d+)'
            cuda = re.search(said, path.read_text())
    library = folder / "bindings" / "torch" / "libdeltic_torch.so"
    with_cuda = definitions["DELTIC_CUDA"] != "OFF" and cuda is not None
    return library, f"cu{cuda[1]}{cuda[2]}" if with_cuda and cuda else None


def lay_out(target: Path, library: Path, unique: str, cuda: str | None) -> Path:
    """Writes the repository with one variant; returns the variant's folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("build.toml", "README.md"):
        shutil.copy(ROOT / "hub" / name, target / name)
    shutil.copy(ROOT / "LICENSE", target / "LICENSE")
    # torch-stable-abi211: the oldest torch whose stable ABI has what the operators use.
    variant = target / "build" / f"torch-stable-abi211-{cuda or 'cpu'}-{platform.machine()}-linux"
    if variant.exists():
        shutil.rmtree(variant)
    shutil.copytree(ROOT / "hub" / "deltic", variant, ignore=shutil.ignore_patterns("__pycache__"))
    package = variant / "_deltic"
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(PACKAGE, package, ignore=ignore)
    shutil.copy(library, package / "libdeltic_torch.so")
    subprocess.run(["strip", "--strip-unneeded", package / "libdeltic_torch.so"], check=True)
    metadata = {
        "id": f"_deltic_{cuda or 'cpu'}_{unique}",
        "name": "deltic",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ["9.0a"]} if cuda else {"type": "cpu"},
    }
    text = json.dumps(metadata, indent=2) + "\n"
    (variant / "metadata.json").write_text(text, encoding="utf-8")
    return variant


def load(target: Path) -> int:
    """Runs the kernel with the hub's own package, where the package index has it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([python_of(), "-m", "venv", place / "venv"], check=True)
        pip, python = place / "venv" / "bin" / "pip", place / "venv" / "bin" / "python"
        subprocess.run([pip, "uninstall", "-q", "-y", "setuptools"], capture_output=True)
        ask = [python_of(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        torch_of = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
        ask[0] = python
        purelib = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
        (Path(purelib) / "torch_of_another.pth").write_text(torch_of)
        arguments = os.environ.get("DELTIC_PIP_ARGS", "").split()
        if subprocess.run([pip, "install", "-q", *arguments, "kernels"]).returncode != 0:
            print("hub: not loaded: the package `kernels` could not be installed", file=sys.stderr)
            return 0
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [python, ROOT / "tools" / "hub_smoke.py", target]
        return subprocess.run(command, cwd=place, env=environment).returncode


def main() -> int:
    unique = digest()
    library, cuda = build(f"deltic_{unique}")
    variant = lay_out(TARGET, library, unique, cuda)
    print(f"hub: wrote {variant.relative_to(ROOT)}")
    return check_hub.report(TARGET) or load(TARGET)


if __name__ == "__main__":
    sys.exit(main())
