#!/usr/bin/env python3
"""Fills the measured errors of docs/numerics.md from the JSON that `deltic verify` writes."""

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

from paper import replace_block

ROOT = Path(__file__).resolve().parent.parent


def field(case, key, default=""):
    """The value of a key of a case line."""
    for word in case.split():
        if word.startswith(key + "="):
            return word[len(key) + 1 :]
    return default


def table(cases):
    """One row per operation, dtype and implementation."""
    groups = {}
    for case in cases:
        if case["status"] == "skip":
            continue
        line = case["case"]
        key = (line.split()[0], field(line, "dtype"), case["impl"])
        groups.setdefault(key, []).append(case)
    lines = [
        "| operation | dtype | implementation | cases | median error | largest error "
        "| largest share of its budget |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (op, dtype, impl), members in sorted(groups.items()):
        errors = [e for case in members for e in case["error"].values()]
        shares = [
            error / case["budget"][tensor]
            for case in members
            for tensor, error in case["error"].items()
            if case["budget"][tensor] > 0
        ]
        if not errors:
            continue
        lines.append(
            f"| {op} | {dtype} | `{impl}` | {len(members)} | {statistics.median(errors):.1e} "
            f"| {max(errors):.1e} | {100 * max(shares, default=0):.0f} % |"
        )
    return lines


def gradient_table(cases):
    """One row per gradient and dtype, over all implementations."""
    groups = {}
    for case in cases:
        if case["status"] == "skip" or case["case"].split()[0] != "backward":
            continue
        for tensor, error in case["error"].items():
            key = (tensor, field(case["case"], "dtype"))
            groups.setdefault(key, []).append((error, case["budget"][tensor]))
    lines = [
        "| gradient | dtype | tensors | median error | largest error "
        "| largest share of its budget |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (tensor, dtype), members in sorted(groups.items()):
        errors = [error for error, _ in members]
        share = max(error / budget for error, budget in members if budget > 0)
        lines.append(
            f"| {tensor} | {dtype} | {len(members)} | {statistics.median(errors):.1e} "
            f"| {max(errors):.1e} | {100 * share:.0f} % |"
        )
    return lines


def machine_text(machine):
    if isinstance(machine, dict):
        return machine.get("cpu") or machine.get("cpu.model") or machine.get("cpu.name") or "?"
    return str(machine)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="JSON of deltic verify")
    args = parser.parse_args()
    run = json.loads(args.run.read_text())
    lines = [
        f"{datetime.date.today().isoformat()}, {machine_text(run['machine'])}, deltic "
        f"{run['version']} at {run['commit']}.",
        "All tensors of all cases under `tests/cases`. A budget is twice the plain algorithm's",
        "error, for standard inputs at most the table's.",
        "",
        *table(run["cases"]),
        "",
        "Gradients by tensor, over all implementations:",
        "",
        *gradient_table(run["cases"]),
    ]
    replace_block(ROOT / "docs" / "numerics.md", "numerics", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
