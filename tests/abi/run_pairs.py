#!/usr/bin/env python3
"""Runs the program of every pair of header and library: all must succeed and print the same bits.

run_pairs.py FOLDER HEADER:LIBRARY ...   FOLDER/abi_HEADER_LIBRARY is the pair's program
"""

import subprocess
import sys


def main():
    folder, pairs = sys.argv[1], sys.argv[2:]
    outputs = {}
    for pair in pairs:
        header, library = pair.split(":")
        known = "known" if library == "grown" else "unknown"
        command = [f"{folder}/abi_{header}_{library}", known]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if found.returncode != 0:
            sys.exit(f"{pair}: exit status {found.returncode}\n{found.stderr}")
        outputs[pair] = found.stdout
    first = outputs[pairs[0]]
    if len(first.split()) < 2000:
        sys.exit(f"{pairs[0]}: expected its results' bits, got {first[:200]!r}")
    wrong = [pair for pair in pairs if outputs[pair] != first]
    if wrong:
        sys.exit(f"other bits than {pairs[0]}: {', '.join(wrong)}")
    print(f"{len(pairs)} pairs of header and library, the same {len(first.split())} words")


if __name__ == "__main__":
    main()
