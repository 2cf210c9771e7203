#!/usr/bin/env python3
"""Runs the examples printed in README.md and docs/, as they are printed.

A fenced block is run when the line before it is a mark:

    <!-- run: NAME -->   the block is written to the file NAME
    <!-- run -->         the block (shell) is run
    <!-- output -->      the block is what the last shell block printed

All blocks of one paper share one scratch folder outside the tree. The installed library is found
through CMAKE_PREFIX_PATH, PKG_CONFIG_PATH and LD_LIBRARY_PATH. A C, C++ or CMake block of README.md
without a mark is an error: what is printed there runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- (run|output)(?:: ([\w.]+))? -->$")
MUST_RUN = {"c", "cpp", "cmake"}


class Failed(Exception):
    pass


def blocks(text):
    """(line number, language, mark, name, body) of every fenced block."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if lines[number].startswith("```"):
            language = lines[number][3:].strip()
            match = MARK.match(lines[number - 1]) if number > 0 else None
            end = number + 1
            while end < len(lines) and lines[end] != "```":
                end += 1
            body = "\n".join(lines[number + 1 : end]) + "\n"
            mark, name = match.groups() if match else (None, None)
            yield number + 1, language, mark, name, body
            number = end
        number += 1


def run_paper(paper, environment, strict):
    """Runs the marked blocks of one paper; returns how many."""
    count = 0
    printed = None
    with tempfile.TemporaryDirectory() as scratch:
        for number, language, mark, name, body in blocks(paper.read_text(encoding="utf-8")):
            place = f"{paper.name}:{number}"
            if mark is None:
                if strict and language in MUST_RUN:
                    raise Failed(f"{place}: a {language} block without a mark")
                continue
            count += 1
            if mark == "output":
                if printed is None:
                    raise Failed(f"{place}: no shell block before the output")
                if printed.strip() != body.strip():
                    raise Failed(f"{place}: expected:\n{body}got:\n{printed}")
            elif name is not None:
                (Path(scratch) / name).write_text(body, encoding="utf-8")
            else:
                ran = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", body],
                    cwd=scratch,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                printed = ran.stdout
                if ran.returncode != 0:
                    raise Failed(f"{place}: exit status {ran.returncode}\n{body}{printed}")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", required=True, type=Path, help="where deltic is installed")
    prefix = parser.parse_args().prefix.resolve()
    environment = dict(os.environ)
    environment["CMAKE_PREFIX_PATH"] = str(prefix)
    environment["PKG_CONFIG_PATH"] = str(prefix / "lib" / "pkgconfig")
    environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
    environment["PATH"] = f"{prefix / 'bin'}:{environment['PATH']}"
    total = 0
    papers = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for paper in papers:
        try:
            total += run_paper(paper, environment, strict=paper.name == "README.md")
        except Failed as failure:
            print(f"readme: {failure}")
            return 1
    if total == 0:
        print("readme: no marked block found")
        return 1
    print(f"readme: {total} blocks of {len(papers)} papers run as printed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
