#!/usr/bin/env python3
"""Checks from the #include lines that every layer sees only the layers below it, that the GPU
backend has its instructions in one room and no launches but those of tile/launch.h, and that no
type of the library has the name of one of the C++ layer, whose users may link both as objects.

Exit status 0 if the tree obeys, 1 with one line per offence. The rules are first tried on a few
made-up files that break them, so that a rule that stopped working is noticed.
"""

import posixpath
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Layer -> layers it may include besides itself.
ALLOWED = {
    "include": set(),
    "src/core": {"include"},
    "src/reference": {"include", "src/core"},
    "src/cpu": {"include", "src/core"},
    "src/cuda": {"include", "src/core"},
    "src/api": {"include", "src/core", "src/reference", "src/cpu", "src/cuda"},
    "bindings": {"include"},
    "cases": {"include"},
    "cli": {"include", "cases"},
    "examples": {"include"},
}

# Room of the GPU backend that kernels share -> rooms it may include besides itself. A kernel's
# folder may include all of them, and other kernels' doors.
ROOMS = {
    "src/cuda/ptx": set(),
    "src/cuda/tile": {"src/cuda/ptx"},
    "src/cuda/schedule": set(),
    "src/cuda/sm90/chunk": {"src/cuda/ptx", "src/cuda/tile", "src/cuda/schedule"},
}

# Header prefix -> layers that may include it. Everything else may not.
FOREIGN = {
    "torch/": {"bindings"},
    "ATen/": {"bindings"},
    "c10/": {"bindings"},
    "Python.h": set(),
    "cuda": {"src/cuda", "bindings", "cases", "cli", "examples"},
    "hwy/": {"src/cpu"},
    "CLI/": {"cli"},
    "nlohmann/": {"cli"},
}

# In the GPU backend: what alone may have it, or None, and what to use instead.
KEPT = [
    (re.compile(r"\basm\b|\b__pipeline_\w*|\b__cvta_\w*"), "src/cuda/ptx", "a function there"),
    (re.compile(r"<<<"), None, "launch or launch_after of cuda/tile/launch.h"),
]

PUBLIC = "include/deltic/deltic.hpp"
NAMESPACE = re.compile(r"namespace\s*([\w:]*)\s*\{$")
TYPE = re.compile(r"(?:struct|class|union)\s+(\w+)[^;]*$")
COMMENT = re.compile(r"//.*")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCE_ENDINGS = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inc")


def layer_of(path):
    """The layer a file of the project belongs to, or None (tests and benchmarks may see all)."""
    for layer in ALLOWED:
        if path.startswith(layer + "/"):
            return layer
    return None


def room_of(path):
    """The shared room of the GPU backend a file is in, or None."""
    for room in ROOMS:
        if path.startswith(room + "/"):
            return room
    return None


def resolve(path, header, known):
    """The project file that an include line of `path` means, or None if it is a foreign header."""
    roots = [posixpath.dirname(path), "src", "include", "."]
    for root in roots:
        candidate = posixpath.normpath(posixpath.join(root, header))
        if candidate in known:
            return candidate
    return None


def strays(path, number, line):
    """One sentence per instruction or launch of the GPU backend that stands in a wrong place."""
    code = COMMENT.sub("", line)
    for pattern, room, instead in KEPT:
        match = pattern.search(code)
        if match and not (room and path.startswith(room + "/")):
            where = f"is for {room} alone" if room else "is not for src/cuda"
            yield f"{path}:{number}: {match.group()} {where}: use {instead}"


def types_of(text):
    """Line number and full name of every type that stands in the first column."""
    spaces = []
    for number, line in enumerate(text.splitlines(), 1):
        space, kind = NAMESPACE.match(line), TYPE.match(line)
        if space:
            spaces.append(space.group(1))
        elif line.startswith("}  // namespace") and spaces:
            spaces.pop()
        elif kind and "" not in spaces:
            yield number, "::".join([*spaces, kind.group(1)])


def offences(files):
    """One sentence per line that breaks a rule. `files` maps paths to texts."""
    found = []
    public = {name for _, name in types_of(files.get(PUBLIC, ""))}
    for path, text in sorted(files.items()):
        layer = layer_of(path)
        if layer is None:
            continue
        for number, name in types_of(text) if layer.startswith("src/") else ():
            if name in public:
                found.append(f"{path}:{number}: {name} is a type of {PUBLIC}: use another name")
        for number, line in enumerate(text.splitlines(), 1):
            if layer == "src/cuda":
                found.extend(strays(path, number, line))
            match = INCLUDE.match(line)
            if not match:
                continue
            header = match.group(2)
            target = resolve(path, header, files)
            if target is not None:
                seen = layer_of(target)
                if seen is None:
                    seen = target.split("/", 1)[0]
                if seen != layer and seen not in ALLOWED[layer]:
                    found.append(f"{path}:{number}: {layer} must not see {seen} ({header})")
                room, other = room_of(path), room_of(target)
                if room and seen == layer and other != room and other not in ROOMS[room]:
                    found.append(f"{path}:{number}: {room} must not see {target} ({header})")
                continue
            for prefix, layers in FOREIGN.items():
                if header.startswith(prefix) and layer not in layers:
                    found.append(f"{path}:{number}: {layer} must not include {header}")
                    break
    return found


def self_check():
    """Fails unless every kind of offence is found in files made for it."""
    base = {
        "include/deltic/deltic.h": "",
        PUBLIC: "namespace deltic {\nnamespace detail {\n}  // namespace detail\n"
        "struct Way : Choice {\n};\n}  // namespace deltic\n",
        "src/core/problem.h": '#include "deltic/deltic.h"\n',
        "src/cpu/cpu.h": '#include "core/problem.h"\n#include <hwy/highway.h>\n',
        "src/reference/reference.h": '#include "core/problem.h"\n',
        "src/api/forward.cpp": '#include "cpu/cpu.h"\n#include "reference/reference.h"\n',
        "src/cuda/ptx/mma.cuh": 'asm volatile("");\n__pipeline_commit();\n',
        "src/cuda/schedule/roles.h": '#include "core/problem.h"\n',
        "src/cuda/sm90/chunk/rows.cuh": '#include "cuda/ptx/mma.cuh"\n',
        "src/cuda/sm90/forward/kernel.cuh": '#include "cuda/sm90/chunk/rows.cuh"\n',
        "src/cuda/sm90/forward/stage.cuh": "int n = 0;  // no asm, no <<<\n",
        "src/cuda/sm90/way.h": "namespace deltic::gpu {\nstruct Way {\n};\n",
        "src/core/way.cpp": "namespace deltic {\nnamespace {\nstruct Way {\n};\n}  // namespace\n",
        "cli/main.cpp": '#include "deltic/deltic.h"\n#include <CLI/CLI.hpp>\n',
        "tests/all.cpp": '#include "cpu/cpu.h"\n',
    }
    assert offences(base) == [], offences(base)
    bad = {
        PUBLIC: '#include "core/problem.h"',
        "include/deltic/x.h": "#include <torch/torch.h>",
        "src/core/a.h": '#include "cpu/cpu.h"',
        "src/core/b.h": "#include <hwy/highway.h>",
        "src/cpu/c.h": '#include "reference/reference.h"',
        "src/cpu/d.cpp": '#  include "../api/forward.cpp"',
        "src/reference/e.cpp": '#include "../cpu/cpu.h"',
        "src/api/f.cpp": "#include <torch/csrc/stable/library.h>",
        "bindings/torch/g.cpp": '#include "core/problem.h"',
        "cli/h.cpp": '#include "../src/core/problem.h"',
        "cases/j.cpp": '#include "../cli/main.cpp"',
        "src/cuda/ptx/k.cuh": '#include "cuda/sm90/chunk/rows.cuh"',
        "src/cuda/tile/l.cuh": '#include "cuda/schedule/roles.h"',
        "src/cuda/schedule/m.cpp": '#include "cuda/sm90/forward/kernel.cuh"',
        "src/cuda/sm90/chunk/n.cuh": '#include "cuda/sm90/forward/kernel.cuh"',
        "src/cuda/tile/o.cuh": 'asm("");',
        "src/cuda/sm80/p.cuh": "__pipeline_wait_prior(0);",
        "src/cuda/sm90/q.cuh": "const auto at = __cvta_generic_to_shared(p);",
        "src/cuda/ptx/r.cuh": "kernel<<<1, 32>>>();",
        "src/api/i.cpp": '#include "tests/all.cpp"',
        "src/core/s.h": "namespace deltic {\nstruct Way {\n",
    }
    for path, text in bad.items():
        got = offences({**base, path: text})
        if len(got) != 1 or not got[0].startswith(path + ":"):
            sys.exit(f"check_layers: the rule against `{text}` in {path} found {got}")


def main():
    self_check()
    listed = subprocess.run(
        [str(ROOT / "tools" / "list_files.sh")], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    files = {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in listed
        if path.endswith(SOURCE_ENDINGS)
    }
    if not any(layer_of(path) == "src/core" for path in files):
        sys.exit("check_layers: no sources found")
    found = offences(files)
    for line in found:
        print(line)
    print(f"layers: {len(files)} files, {len(found)} offences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
