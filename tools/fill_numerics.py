#!/usr/bin/env python3
"""Fills the measured errors of docs/numerics.md.

    tools/fill_numerics.py v.json     # what `deltic verify --json v.json` wrote on a CPU
    tools/fill_numerics.py            # the errors on a GPU alone

Those are the errors of the benchmark run in docs/benchmarks/h200.json (or --gpu FILE): every row of
it was compared before it was timed.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from paper import replace_block

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def field(case: str, key: str, default: str = "") -> str:
    """The value of a key of a case line."""
    for word in case.split():
        if word.startswith(key + "="):
            return word[len(key) + 1 :]
    return default


def operation(case: str) -> str:
    return case.split()[0]


def table(cases: Iterable[Row]) -> list[str]:
    """One row per operation, dtype and implementation."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for case in cases:
        if case["status"] == "skip":
            continue
        line = case["case"]
        key = (operation(line), field(line, "dtype"), case["impl"])
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


def gradient_table(cases: Iterable[Row]) -> list[str]:
    """One row per gradient and dtype, over all implementations."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case in cases:
        if case["status"] == "skip" or operation(case["case"]) != "backward":
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


# Columns of the error budget: outputs and states are the first, these are by name.
COLUMNS = {"dbeta": 2, "dg": 3, "dA_log": 4, "ddt_bias": 4}
GRADIENTS = ("dq", "dk", "dv", "dx", "dz", "da", "dweight", "dbias", "d_initial_state")


class Limits(NamedTuple):
    """What the page allows, of standard inputs: a number for each column of its table."""

    half: list[float]  # where operands of 16 bits enter a product
    f32: list[float]


def limits_of(page: str) -> Limits:
    """The limits in the page's own table of the error budget."""
    found = []
    for start in ("| bf16 or fp16, standard", "| fp32, and building blocks"):
        row = next((line for line in page.splitlines() if line.startswith(start)), "")
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) < 7:
            raise ValueError(f"page: expected a row `{start[2:]}` in the error budget, got none")
        numbers = (cell.partition(" ") for cell in cells[2:7])
        found.append([float(n) * (0.01 if unit == "%" else 1.0) for n, _, unit in numbers])
    return Limits(*found)


def limit_of(case: str, tensor: str, limits: Limits) -> float | None:
    """The limit of a row's tensor; None for inputs that are not standard."""
    is_standard = (
        field(case, "keys", "random") == "random"
        and field(case, "gates", "random") in ("random", "slow", "softplus")
        and field(case, "beta") != "2sigmoid"
    )
    if not is_standard:
        return None
    op = operation(case)
    has_products = (
        op in ("forward", "backward", "kkt", "scores", "scores_inverse")
        or (op == "wy" and tensor in ("w", "u"))
        or (op == "decode" and tensor == "o")
    )
    is_half = field(case, "dtype") in ("bf16", "f16")
    column = COLUMNS.get(tensor, 1 if tensor in GRADIENTS else 0)
    return (limits.half if is_half and has_products else limits.f32)[column]


def gpu_table(cases: Iterable[Row], limits: Limits) -> list[str]:
    """One row per suite, operation, dtype, implementation and output."""
    groups: dict[tuple[str, ...], list[tuple[float, float | None]]] = {}
    for case in cases:
        line = case["case"]
        for tensor, error in case.get("errors", {}).items():
            if case["status"] != "pass" or error is None:
                continue
            key = (case["suite"], operation(line), field(line, "dtype"), case["impl"], tensor)
            groups.setdefault(key, []).append((error, limit_of(line, tensor, limits)))
    lines = [
        "| suite | operation | dtype | implementation | output | rows | largest error | limit "
        "| share of it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (suite, op, dtype, impl, tensor), members in sorted(groups.items()):
        worst = max(error for error, _ in members)
        bounds = {bound for _, bound in members}
        bound = bounds.pop() if len(bounds) == 1 else None
        allowed = "- | -" if bound is None else f"{bound:.1e} | {100 * worst / bound:.0f} %"
        lines.append(
            f"| {suite} | {op} | {dtype} | `{impl}` | {tensor} | {len(members)} | {worst:.1e} "
            f"| {allowed} |"
        )
    return lines


def machine_text(machine: Any) -> str:
    if isinstance(machine, dict):
        return machine.get("cpu") or machine.get("cpu.model") or machine.get("cpu.name") or "?"
    return str(machine)


def cpu_text(run: Row) -> list[str]:
    return [
        f"{datetime.date.today().isoformat()}, {machine_text(run['machine'])}, deltic "
        f"{run['version']} at {run['commit']}.",
        "All tensors of all cases under `tests/cases`; a budget is as said above.",
        "",
        *table(run["cases"]),
        "",
        "Gradients by tensor, over all implementations:",
        "",
        *gradient_table(run["cases"]),
    ]


def gpu_text(run: Row, limits: Limits) -> list[str]:
    gpu = run["machine"].get("gpu.0", "unknown GPU").split(",")[0]
    return [
        f"{run['date']}, {gpu}, deltic {run['version']} at {run['commit']}: the rows of",
        "[benchmarks/h200.md](benchmarks/h200.md). Parts of a row's results are compared with the",
        "oracle, a whole sequence of a longer one with fp32 on the CPU; the larger error counts.",
        "The limit is that of the error budget above.",
        "",
        *gpu_table(run["cases"], limits),
    ]


def read_run(path: Path, schema: str, argument: str) -> Row:
    """The JSON of a run of the program; a ValueError for anything else."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{argument}: expected a file, got {path} ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{argument}: expected JSON, got {path} ({error})") from None
    found = run.get("schema") if isinstance(run, dict) else None
    if found != schema:
        raise ValueError(f"{argument}: expected the schema {schema}, got {found} in {path}")
    return dict(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="JSON of deltic verify")
    parser.add_argument(
        "--gpu",
        type=Path,
        default=ROOT / "docs" / "benchmarks" / "h200.json",
        metavar="FILE",
        help="JSON of deltic bench --device cuda (default: docs/benchmarks/h200.json)",
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "numerics.md", metavar="PAGE")
    args = parser.parse_args()
    try:
        limits = limits_of(args.to.read_text(encoding="utf-8"))
        gpu = gpu_text(read_run(args.gpu, "deltic.bench/1", "--gpu"), limits)
        cpu = cpu_text(read_run(args.run, "deltic.verify/1", "run")) if args.run else None
    except (OSError, ValueError) as error:
        print(f"fill_numerics.py: {error}", file=sys.stderr)
        return 2
    if cpu is not None:
        replace_block(args.to, "numerics", "\n".join(cpu))
    replace_block(args.to, "numerics-gpu", "\n".join(gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
