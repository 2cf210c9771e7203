#!/usr/bin/env python3
"""The platform tag that a wheel may carry: from the symbol versions its libraries ask for.

  tools/wheel_tag.py WHEEL           fails unless the name promises what the libraries need
  tools/wheel_tag.py --write WHEEL   gives the wheel the lowest tag it can keep, prints the new name

A tag manylinux_2_N promises a start on every Linux with glibc 2.N, and with the libstdc++ that came
with such systems. torch brings libtorch_cpu and the OpenMP runtime; neither may be in the wheel,
and the latter may not be asked for by name: two runtimes would each keep their own threads.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import index_page

# What a system of each glibc has beside it: the newest libstdc++, C++ runtime and libgcc versions.
# Distributions: 2.28 RHEL 8, 2.31 Debian 11, 2.34 RHEL 9, 2.35 Ubuntu 22.04, 2.36 Debian 12.
SYSTEMS = {
    17: {"GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.8.0"},
    24: {"GLIBCXX": "3.4.22", "CXXABI": "1.3.10", "GCC": "4.8.0"},
    28: {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
    31: {"GLIBCXX": "3.4.28", "CXXABI": "1.3.12", "GCC": "7.0.0"},
    34: {"GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"},
    35: {"GLIBCXX": "3.4.30", "CXXABI": "1.3.13", "GCC": "12.0.0"},
    36: {"GLIBCXX": "3.4.30", "CXXABI": "1.3.13", "GCC": "12.0.0"},
    39: {"GLIBCXX": "3.4.33", "CXXABI": "1.3.15", "GCC": "14.0.0"},
    41: {"GLIBCXX": "3.4.33", "CXXABI": "1.3.15", "GCC": "14.0.0"},
}
FROM_THE_SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
FROM_THE_SYSTEM |= {
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
FROM_TORCH = {"libtorch_cpu.so", "libc10.so"}
NAME = re.compile(
    r"(?P<stem>.+-py3-none)-(?P<platform>(?:linux|manylinux_2_(?P<minor>\d+))_(?P<arch>\w+))"
)


class Refusal(Exception):
    """Why no tag fits."""


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def readelf(*arguments: str) -> str:
    command = ["readelf", "-W", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_needs(name: str, library: str) -> None:
    """Only what the system or torch has may be asked for."""
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library)):
        if needed not in FROM_THE_SYSTEM | FROM_TORCH:
            raise Refusal(f"{name}: expected libraries of the system and of torch, got {needed}")


def least_minor(name: str, library: str) -> int:
    """The N of the oldest glibc 2.N whose system has every version the library asks for."""
    asked: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"Name: ([A-Z]+)_([\d.]+)\b", readelf("-V", library)):
        asked[family] = max(asked.get(family, (0,)), number(version))
    unknown = set(asked) - {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}
    if unknown:
        raise Refusal(f"{name}: expected versions of glibc, libstdc++ and libgcc, got {unknown}")
    for minor, has in SYSTEMS.items():
        newest = {"GLIBC": (2, minor), **{family: number(v) for family, v in has.items()}}
        if all(version <= newest[family] for family, version in asked.items()):
            return minor
    raise Refusal(f"{name}: expected at most the versions of glibc 2.{max(SYSTEMS)}, got {asked}")


def minor_of(wheel: Path) -> int:
    """The N that the libraries in a wheel need."""
    found = [min(SYSTEMS)]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if ".so" not in Path(name).name:
                continue
            if re.match(r"lib(gomp|omp|iomp|torch|c10)", Path(name).name):
                raise Refusal(f"{name}: expected torch to bring it, got a copy in the wheel")
            library = archive.extract(name, folder)
            check_needs(name, library)
            found.append(least_minor(name, library))
    return max(found)


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def retagged(wheel: Path, platform: str) -> Path:
    """The wheel under its new name; its own record of the tag says the same.

    Its description becomes one for a package index (tools/index_page.py).
    """
    stem = NAME.match(wheel.stem)["stem"]
    target = wheel.with_name(f"{stem}-{platform}.whl")
    with zipfile.ZipFile(wheel) as old:
        entries = {info: old.read(info) for info in old.infolist()}
    tag = f"Tag: py3-none-{platform}".encode()
    changes = {
        "WHEEL": lambda said: re.sub(rb"^Tag: .*$", tag, said, flags=re.MULTILINE),
        "METADATA": index_page.with_index_page,
    }
    record = next(i for i in entries if i.filename.endswith(".dist-info/RECORD"))
    for info, data in entries.items():
        folder, _, name = info.filename.rpartition("/")
        if not folder.endswith(".dist-info") or name not in changes:
            continue
        entries[info] = new = changes[name](data)
        row = f"{info.filename},sha256={digest(new)},{len(new)}"
        line = re.compile(rf"^{re.escape(info.filename)},.*$", re.MULTILINE)
        entries[record] = line.sub(row, entries[record].decode()).encode()
    if wheel != target:
        wheel.unlink()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in entries.items():
            archive.writestr(info, data)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="give the wheel the tag it can keep")
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    name = NAME.fullmatch(arguments.wheel.stem)
    try:
        if name is None:
            raise Refusal("expected a wheel py3-none-linux or py3-none-manylinux_2_N")
        minor = minor_of(arguments.wheel)
        if arguments.write:
            print(retagged(arguments.wheel, f"manylinux_2_{minor}_{name['arch']}"))
        elif name["minor"] is None or int(name["minor"]) < minor:
            raise Refusal(f"expected manylinux_2_{minor} or later, got {name['platform']}")
        else:
            print(f"wheel: {arguments.wheel.name}: needs glibc 2.{minor}, as its name says")
    except Refusal as refusal:
        print(f"wheel: {arguments.wheel.name}: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
