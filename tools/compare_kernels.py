#!/usr/bin/env python3
"""Says of every GPU kernel whether it is that of another commit, on a machine without a GPU.

    tools/compare_kernels.py main                     # the working tree against main
    tools/compare_kernels.py HEAD~3 sm90/forward      # files whose path contains a word
    tools/compare_kernels.py --arch 80 HEAD sm80

Every .cu of src/cuda whose text with all of its includes changed (comments, spaces, and which file
a line is in aside) is compiled to PTX in both trees and compared kernel by kernel: names count
nothing, registers and the order of instructions do. Where PTX differs ptxas assembles both:
"same code" has the same bytes and registers, "same counts" as many registers and as many of every
instruction, in another order or with other registers. Exit status 1 if a kernel differs or is in
one tree alone. PTX stays in build/kernels, named after what it was made from.
"""

import argparse
import concurrent.futures
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "build/kernels"
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]  # of cmake/cuda.cmake; no -lineinfo
FUNCTION = re.compile(r"^(?=(?:\.\w+ )*\.(?:entry|func)\b)", re.M)
NAME = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
# What the compiler calls after functions and files, or numbers through all of a file.
NAMES = re.compile(r"(?<![\w$%])(?:_Z[\w$]+|\$L_\w+|__local_depot\d+|\w+_param_\d+)")

Code = dict[str, tuple[bytes, int]]  # name -> machine code, registers


def expand(tree: Path, file: Path, seen: set[Path], lines: list[str]) -> list[str]:
    """The file's lines, and in the place of an #include of the tree those of that file."""
    seen.add(file)
    for line in re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(), flags=re.S).splitlines():
        line = " ".join(line.split())
        include = re.fullmatch(r'# ?include "([^"]+)"', line)
        folders = [file.parent, tree / "src", tree / "include"] if include else []
        found = [Path(os.path.normpath(f / include[1])) for f in folders if include]
        path = next((f for f in found if f.is_file()), None)
        if path is None and line not in ("", "#pragma once"):
            lines.append(line)
        elif path is not None and path not in seen:
            expand(tree, path, seen, lines)
    return lines


def key_of(tree: Path, file: Path, arch: str) -> str:
    text: list[str] = []
    opened: list[str] = []
    for line in expand(tree, file, set(), []):
        if line.startswith("namespace") and text and text[-1] == "}" and opened[-1:] == [line]:
            text.pop()  # a file ends and the next goes on in its namespace
            continue
        if line.startswith("namespace"):
            opened.append(line)
        text.append(line)
    return hashlib.sha256("\n".join([arch, *FLAGS, *text]).encode()).hexdigest()[:32]


def ptx_of(tree: Path, file: Path, arch: str, key: str) -> str:
    stored = STORE / f"{key}.ptx"
    if not stored.exists():
        made = STORE / f"{key}.{os.getpid()}"
        code = f"-gencode=arch=compute_{arch},code=compute_{arch}"
        include = [f"-I{tree / 'src'}", f"-I{tree / 'include'}"]
        subprocess.run(["nvcc", *FLAGS, code, *include, "-ptx", file, "-o", made], check=True)
        made.rename(stored)
    return stored.read_text()


def neutral(text: str) -> str:
    """PTX whose names are numbers in the order of their first appearance."""
    numbers: dict[str, str] = {}
    return NAMES.sub(lambda m: numbers.setdefault(m[0], f"name_{len(numbers)}"), text)


def split(ptx: str) -> dict[str, tuple[str, str]]:
    """Demangled name of a kernel, or of a function that is called -> mangled name and text."""
    ptx = "\n".join(x for x in re.sub(r"//[^\n]*", "", ptx).splitlines() if x.strip())
    start, *texts = FUNCTION.split(ptx)
    functions = [(NAME.search(text)[1], neutral(text)) for text in texts]
    mangled = "\n".join(name for name, _ in functions)
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True).stdout
    parts = dict(zip(names.splitlines(), functions, strict=True))
    return parts | {"declarations": ("", "\n".join(sorted(NAMES.sub("name", start).splitlines())))}


def machine_code(key: str, arch: str) -> Code:
    """From the sections .text.NAME of ptxas' ELF file, and what it says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        run = ["ptxas", "-v", f"-arch=sm_{arch}", STORE / f"{key}.ptx", "-o", out.name]
        said = subprocess.run(run, check=True, capture_output=True, text=True).stderr
        data = Path(out.name).read_bytes()
    registers = dict(re.findall(r"properties for (\S+)\n.*\n.*?Used (\d+) registers", said))
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<3H", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    code = {}
    for name, _, _, _, at, length in sections:
        begin = sections[names][4] + name
        text = data[begin : data.index(b"\0", begin)].decode()
        if text.startswith(".text."):
            code[text[6:]] = (data[at : at + length], int(registers.get(text[6:], 0)))
    return code


def counts(code: tuple[bytes, int]) -> tuple[Counter[int], int]:
    """Of instructions, 16 bytes each, by the 12 bits that say which; and registers."""
    text = code[0]
    return Counter(text[i] | (text[i + 1] & 15) << 8 for i in range(0, len(text), 16)), code[1]


def compare(file: str, trees: tuple[Path, Path], arch: str) -> Counter[str]:
    keys = [key_of(t, t / file, arch) if (t / file).exists() else "" for t in trees]
    if keys[0] == keys[1]:
        return Counter({"files with the same text": 1})
    old, new = (
        split(ptx_of(t, t / file, arch, k)) if k else {} for t, k in zip(trees, keys, strict=True)
    )
    # By name; what is called otherwise now, by its text.
    left = [m for m in new if m not in old]
    pairs = {
        n: n if n in new else next((m for m in left if new[m][1] == old[n][1]), None) for n in old
    }
    code: list[Code] = []
    verdicts = [("only after", n, "") for n in left if n not in pairs.values()]
    for before, after in pairs.items():
        if after is None:
            verdicts.append(("only before", before, ""))
        elif old[before][1] == new[after][1]:
            verdicts.append(("same PTX", after, ""))
        else:
            code = code or [machine_code(k, arch) for k in keys]
            none = (b"", 0)
            a, b = code[0].get(old[before][0], none), code[1].get(new[after][0], none)
            change = f"{len(a[0])} -> {len(b[0])} bytes, {a[1]} -> {b[1]} registers"
            same = "same code" if a == b else "same counts" if counts(a) == counts(b) else "differs"
            verdicts.append((same if none not in (a, b) else "differs", after, change))
    for verdict, name, change in verdicts:
        print(f"{verdict:11} {file}: {name[:150]} {change}".rstrip(), flush=True)
    return Counter(verdict for verdict, _, _ in verdicts)


def main() -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("rev", help="commit to compare the working tree with")
    parser.add_argument("words", nargs="*", help="only files whose path contains one of these")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    STORE.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        trees = (Path(folder), ROOT)
        archive = ["git", "archive", args.rev, "src", "include"]
        tar = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=tar, check=True)
        found = {str(f.relative_to(t)) for t in trees for f in t.glob("src/cuda/**/*.cu")}
        files = sorted(f for f in found if not args.words or any(w in f for w in args.words))
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for count in pool.map(lambda f: compare(f, trees, args.arch), files):
                total += count
    print(", ".join(f"{n} {what}" for what, n in sorted(total.items())))
    return 1 if {"differs", "only before", "only after"} & set(total) else 0


if __name__ == "__main__":
    sys.exit(main())
