#!/usr/bin/env python3
"""Says how far a build is, from what pip, CMake and ninja print; a file keeps all of it.

tools/build_progress.py LOG    a line for every tenth of the files, and for what is being built
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator

# What CMake says about the parts that take long.
_PARTS = re.compile(r"^\s*-- (GPU backend: .*|CPU: .*)$")
# Of ninja, and of make where there is no ninja.
_STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_PERCENT = re.compile(r"^\s*\[ *(\d+)%\]")


def progress(lines: Iterable[str], clock=time.monotonic) -> Iterator[str]:
    """The lines to be shown of a build's output."""
    start, last = clock(), 0
    for line in lines:
        part = _PARTS.match(line)
        if part is not None:
            minutes = ", which takes some minutes" if "CUDA" in part[1] else ""
            yield f"{part[1]}{minutes}"
            continue
        step, percent = _STEP.match(line), _PERCENT.match(line)
        if step is None and percent is None:
            continue
        done, total = (int(step[1]), int(step[2])) if step else (int(percent[1]), 100)
        tenth = 10 * done // max(total, 1)
        if tenth < last:  # another build begins
            last = 0
        if tenth > last:
            last = tenth
            what = f"{done} of {total} files" if step else f"{done} %"
            yield f"compiled {what}, {clock() - start:.0f} s"


def main() -> int:
    if len(sys.argv) != 2:
        print("build_progress.py: expected a file for the log", file=sys.stderr)
        return 2
    with open(sys.argv[1], "w", encoding="utf-8", errors="replace") as log:

        def kept() -> Iterator[str]:
            for line in sys.stdin:
                log.write(line)
                log.flush()
                yield line

        for text in progress(kept()):
            print(f"wheel: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
