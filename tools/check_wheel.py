#!/usr/bin/env python3
"""Checks a built wheel: tag, size, what its library shows, files inside, links of its description.

  tools/check_wheel.py WHEEL

Fails with one line per finding. `tools/wheel_tag.py` says how the tag is found.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import index_page
import wheel_tag

# What Hugging Face's kernel hub asks for: RHEL 8, Debian 10, Ubuntu 20.04 and later.
MOST_GLIBC = 28
# Megabytes of the file; without GPU code 2.4 in November 2026.
MOST_MB = {"cpu": 4, "cuda": 60}
LIBRARY = "deltic/libdeltic_torch.so"
EXPORTED = re.compile(r"deltic_torch_\w+")
MUST_HAVE = ("deltic/__init__.py", "deltic/py.typed", LIBRARY)
MAY_HAVE = re.compile(r"deltic/[\w/]+\.py|deltic/py\.typed|deltic-[^/]+\.dist-info/[\w./-]+")


def exported(library: str) -> set[str]:
    command = ["nm", "--dynamic", "--defined-only", "--extern-only", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def findings(wheel: Path) -> list[str]:
    """What is wrong with the wheel, in sentences."""
    found = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        found += [f"expected {name}, got none" for name in MUST_HAVE if name not in names]
        strange = [n for n in names if n != LIBRARY and not MAY_HAVE.fullmatch(n)]
        found += [f"expected the package and its metadata alone, got {n}" for n in strange]
        for name in names:
            if name.endswith(".dist-info/METADATA"):
                _, _, text = archive.read(name).decode().partition("\n\n")
                found += [
                    f"expected links that an index can follow in its description, got {target}"
                    for target in index_page.relative(text)
                ]
        if LIBRARY not in names:
            return found
        data = archive.read(LIBRARY)
        library = archive.extract(LIBRARY, folder)
        extra = sorted(n for n in exported(library) if not EXPORTED.fullmatch(n))
        if extra:
            found.append(f"expected exported names deltic_torch_*, got {', '.join(extra[:5])}")
        if re.search(r"\((RPATH|RUNPATH)\)", wheel_tag.readelf("-d", library)):
            found.append("expected a library without a search path, got one")
    most = MOST_MB["cuda" if b"libcudart" in data or b".nv_fatbin" in data else "cpu"]
    size = wheel.stat().st_size / 1e6
    if size > most:
        found.append(f"expected at most {most} MB, got {size:.1f} MB")
    try:
        minor = wheel_tag.minor_of(wheel)
        if minor > MOST_GLIBC:
            found.append(f"expected symbols of glibc 2.{MOST_GLIBC}, got some of 2.{minor}")
        name = wheel_tag.NAME.fullmatch(wheel.stem)
        if name is None or name["minor"] is None or int(name["minor"]) < minor:
            found.append(f"expected a tag of at least manylinux_2_{minor}")
    except wheel_tag.Refusal as refusal:
        found.append(str(refusal))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    found = findings(wheel)
    for line in found:
        print(f"wheel: {wheel.name}: {line}", file=sys.stderr)
    if not found:
        size = f"{wheel.stat().st_size / 1e6:.1f} MB"
        print(f"wheel: {wheel.name}: {size}, glibc 2.{MOST_GLIBC} is enough")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
