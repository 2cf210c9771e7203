#!/usr/bin/env python3
"""Checks the texts of the project for what must not be in them.

Exit status 0 if nothing is found, 1 with one line per place. Every pattern carries an example that
it must find; patterns and examples are put together from pieces so that this file passes itself.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SOURCES = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt", ".in")
DATA = (".json",)  # measurements quote names of other programs
CORPUS = "tests/fuzz/corpus/"  # bytes, not text

# (what is wrong, pattern, an example, endings it applies to or None for all texts)
RULES = [
    ("registry host", r"py" r"pi\.org|pytho" r"nhosted|crate" r"s\.io", "py" + "pi.org", None),
    ("home folder", r"(?<![\w.])/(ho" r"me|ro" r"ot)/\w", "see /ro" + "ot/x", None),
    ("em dash", "\u2014", "a " + chr(0x2014) + " b", None),
    ("not ASCII", r"[^\x00-\x7f]", chr(0xE9), SOURCES),
    ("unfinished work", r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", "TO" + "DO: x", None),
    ("merge marker", r"^(<{7}|>{7}) ", "<" * 7 + " HEAD", None),
    ("blank at the end of a line", r"[ \t]+$", "x ", None),
    ("tab", r"\t", "\tx", SOURCES),
]
PRAISE = re.compile(r"(^|[_.-])(fa" r"st|optimi[sz]ed|v2|n" r"ew)([_.-]|$)")
# Modules that mirror another package's, in which it chose the names.
MIRROR, MIRRORED = "python/deltic/fla/", ("wy_fast.py",)


def main():
    rules = [(what, re.compile(pattern), ends) for what, pattern, _, ends in RULES]
    for (what, pattern, _), (_, _, example, _) in zip(rules, RULES, strict=True):
        if not pattern.search(example):
            sys.exit(f"check_words: the rule `{what}` misses its own example")

    listed = subprocess.run(
        [str(ROOT / "tools" / "list_files.sh")], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found = []
    for path in listed:
        for part in Path(path).parts:
            if PRAISE.search(part) and not (path.startswith(MIRROR) and part in MIRRORED):
                found.append(f"{path}: a name that praises ({part})")
        if path.endswith(DATA) or path.startswith(CORPUS):
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            found.append(f"{path}: not UTF-8")
            continue
        if text and not text.endswith("\n"):
            found.append(f"{path}: no newline at the end")
        for number, line in enumerate(text.splitlines(), 1):
            for what, pattern, ends in rules:
                if (ends is None or path.endswith(ends)) and pattern.search(line):
                    found.append(f"{path}:{number}: {what}")
    for line in found:
        print(line)
    print(f"words: {len(listed)} files, {len(found)} places")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
