#!/usr/bin/env python3
"""Which GPUs' code the objects of a build have, compared with what the build was asked for.

gpu_code.py FOLDER ARCHS     objects under FOLDER, ARCHS as in DELTIC_CUDA_ARCHS: `80 90a 90-ptx`
gpu_code.py --list FILE...   prints what is inside, with its bytes

A fat binary (`.nv_fatbin`) is a row of containers, one per translation unit: a magic number, a
version, the size of its header (16) and of the parts behind it. Each part has a header: kind (1:
PTX, 2: machine code), version, its own size, then that of the part, at byte 28 the architecture's
number and at byte 40 flags: one of them is the `a` of sm_90a.
"""

import struct
import sys
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, CODE = 1, 2
EXACT = 1 << 20  # a flag: for this architecture alone


def section(data: bytes, name: bytes) -> bytes:
    """The bytes of a section of a 64-bit ELF file, empty if there is none."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("expected a 64-bit ELF file")
    at = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, at + i * size) for i in range(count)]
    text = headers[names][4]
    for header in headers:
        begin = text + header[0]
        if data[begin : data.index(b"\0", begin)] == name:
            return data[header[4] : header[4] + header[5]]
    return b""


def parts(fat: bytes) -> list[tuple[str, int]]:
    """(`80` or `80-ptx`, bytes) of every part of every container."""
    found = []
    at = 0
    while at + 16 <= len(fat):
        magic, _, header, size = struct.unpack_from("<IHHQ", fat, at)
        if magic != MAGIC:
            at += 8  # containers begin at multiples of 8
            continue
        part, end = at + header, at + header + size
        while part < end:
            kind, _, header_size, bytes_ = struct.unpack_from("<HHIQ", fat, part)
            arch = struct.unpack_from("<I", fat, part + 28)[0]
            flags = struct.unpack_from("<Q", fat, part + 40)[0]
            if kind not in (PTX, CODE) or header_size < 48:
                raise ValueError(f"expected PTX or machine code, got a part of kind {kind}")
            name = f"{arch}a" if flags & EXACT else str(arch)
            found.append((f"{name}-ptx" if kind == PTX else name, bytes_))
            part += header_size + bytes_
        at = end
    return found


def check(folder: Path, archs: list[str]) -> list[str]:
    """What is wrong, in words."""
    wrong = []
    objects = sorted(folder.rglob("*.cu.o"))
    if not objects:
        return [f"expected objects of .cu files under {folder}, got none"]
    with_code = 0
    for path in objects:
        hopper = "sm90" in path.relative_to(folder).parts
        expected = {"90a"} if hopper else set(archs)
        got = {name for name, _ in parts(section(path.read_bytes(), b".nv_fatbin"))}
        with_code += bool(got)
        if got and got != expected:
            wrong.append(
                f"{path.relative_to(folder)}: expected {sorted(expected)}, got {sorted(got)}"
            )
    if with_code == 0:
        wrong.append("expected GPU code in some object, got none")
    print(f"{len(objects)} objects, {with_code} with GPU code, {len(wrong)} wrong")
    return wrong


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "--list":
        sums: dict[str, int] = {}
        for name in sys.argv[2:]:
            for arch, size in parts(section(Path(name).read_bytes(), b".nv_fatbin")):
                sums[arch] = sums.get(arch, 0) + size
        for arch, size in sorted(sums.items()):
            print(f"{arch:8} {size / 1e6:8.2f} MB")
        return 0
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    wrong = check(Path(sys.argv[1]), sys.argv[2].split())
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
