#!/usr/bin/env python3
"""Writes h200.md and h200.json (docs/benchmarks, or --to FOLDER) from one run of bench/gpu.sh.

    bench/gpu_table.py FOLDER     # what bench/gpu.sh left: times.json, run.json, logs

Every time comes from that run; the others' times are those of bench/anchors/h200.json, measured on
the same kind of GPU in the same way (graph replay, cold cache).
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COPY_TBPS = 4.27  # of an H200, measured; floors are bytes at this rate
# KDA forward by row, ms: needed, aim.
KDA_NEEDED = {
    "8192 H=96 HV=96": (0.60, 0.36),
    "8192 H=64 HV=64": (0.42, 0.30),
    "8192 H=32 HV=32": (0.25, 0.20),
    "8192 H=8 HV=8": (0.15, 0.09),
    "32768 H=8 HV=8": (0.80, 0.25),
    "131072 H=4 HV=4": (2.5, 0.50),
}
# Rows that `auto` cuts into pieces of at least 24 chunks on 132 SMs: random gates forget a piece's
# start, so that its transfer is short; slow ones do not, and the whole transfer is the work again.
KDA_SHORT = ("8192 H=16 HV=16", "8192 H=8 HV=8", "32768 H=8 HV=8", "131072 H=4 HV=4")
# GDN forward by row, ms needed.
GDN_NEEDED = {
    "4 x 8192 H=16 HV=32": 0.41,
    "4 x 8192 H=16 HV=64": 0.80,
    "8 x 1024 H=16 HV=32": 0.125,
    "8 x 1024 H=16 HV=16": 0.066,
    "32768 H=2 HV=8": 0.24,
}
# KDA gradients by row, ms: needed, aim.
KDA_BACKWARD_NEEDED = {
    "8192 H=96 HV=96 random": (3.0, 1.9),
    "8192 H=64 HV=64 random": (2.0, 1.3),
    "8192 H=32 HV=32 random": (1.05, 0.7),
}
# Training steps by row: ms needed and aimed at.
STEPS_NEEDED = {
    "KDA 8192 H=96 HV=96 bounded, random": (4.0, 2.6),
    "KDA 8192 H=96 HV=96 bounded, slow": (4.0, 2.6),
    "KDA 4 x 4096 H=64 HV=64 bounded, random": (5.5, 3.6),
    "KDA 4 x 4096 H=64 HV=64 softplus": (5.8, 3.8),
    "KDA 2 x 16384 H=16 HV=16 bounded, random": (3.2, 2.0),
    "KDA 8192 H=32 HV=32 bounded, random": (1.6, 1.0),
    "KDA 8192 H=8 HV=8 bounded, random": (1.3, 0.6),
    "DeltaNet 4 x 4096 H=64 HV=64": (3.8, 2.6),
}
# Memory of a step beyond its inputs, GiB needed and aimed at.
PEAK_NEEDED: dict[str, tuple[float, float | None]] = {
    "KDA 8192 H=96 HV=96 bounded, random": (2.5, 1.8),
    "KDA 8192 H=96 HV=96 bounded, slow": (2.5, None),
}
# Decode: suite, a pattern of its rows' labels, us needed and aimed at of each of them.
DECODE_NEEDED = (
    ("decode", r"(GDN|KDA) B=1 fp32", 4.2, 3.2),
    ("decode", r"GDN B=1 bf16", 3.3, 2.8),
    ("decode", r"KDA B=1 bf16", 2.65, 2.4),
    ("decode", r"(GDN|KDA) B=64 fp32", 69, 66),
    ("decode", r"(GDN|KDA) B=64 bf16", 37, 34),
    ("decode", r"(GDN|KDA) B=256 fp32", 264, 258),
    ("decode", r"(GDN|KDA) B=256 bf16", 137, 131),
    ("decode_tokens", r"GDN B=64 fp32 .* 4 tokens", 76, 70),
    ("decode_tokens", r"GDN B=64 bf16 .* 4 tokens", 44, 38),
    ("decode_tokens", r"KDA B=64 bf16 .* 4 tokens", 46, 40),
    ("decode_tokens", r"GDN B=64 fp32 .* 8 tokens, not kept", 50, 40),
)
# Over the best other: geometric mean and least, needed and aim.
SUITES_NEEDED = {
    "gdn_backward": ("GDN gradients", (1.1, 0.85), (1.5, 1.2)),
    "gdn_backward_packed": ("GDN gradients, packed", None, None),
    "decode": ("decode", (1.0, 0.92), (1.08, 1.0)),
    "decode_tokens": ("decode of several tokens", None, None),
}
OVER_CUDNN = "geometric mean over cuDNN; least"
Row = dict[str, Any]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def floor_ms(row: Row) -> float:
    """The time that the row's bytes take at copy speed."""
    return float(row["bytes"]) / COPY_TBPS * 1e-9


class Run:
    """The rows of a bench run, by suite."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.rows: list[Row] = [r for r in document["cases"] if "median_ms" in r]
        self.failed: list[Row] = [r for r in document["cases"] if "median_ms" not in r]

    def suite(self, name: str) -> list[Row]:
        return [r for r in self.rows if r["suite"] == name]

    def compared(self, name: str) -> list[Row]:
        return [r for r in self.suite(name) if r["ratio"] is not None]

    def find(self, suite: str, label: str) -> Row | None:
        return next((r for r in self.suite(suite) if r["label"] == label), None)


@dataclass
class Line:
    """One line of the table on top."""

    work: str
    measured: str
    needed: str = ""
    aim: str = ""
    met: bool | None = None  # nothing was asked for
    floor: str = ""

    def cells(self) -> tuple[str, ...]:
        met = "" if self.met is None else "yes" if self.met else "no"
        return (self.work, self.measured, self.needed, self.aim, self.floor, met)


def time_line(work: str, row: Row | None, needed: float, aim: float | None) -> list[Line]:
    if row is None:
        return []
    ms = row["median_ms"]
    floor = f"{floor_ms(row):.3f} ms"
    wanted, hoped = ("" if x is None else f"{x:.{2 + (x < 0.2)}f} ms" for x in (needed, aim))
    return [Line(work, f"{ms:.3f} ms", wanted, hoped, ms <= needed, floor=floor)]


def ratio_line(
    work: str, rows: list[Row], needed: tuple[float, float] | None, aim: tuple[float, float] | None
) -> Line:
    """Geometric mean and least of the ratios to the best other."""
    mean, least = geometric_mean(r["ratio"] for r in rows), min(r["ratio"] for r in rows)
    pair = "{:.2f}; {:.2f}".format
    return Line(
        f"{work}, {len(rows)} rows, geometric mean over the best other; least",
        pair(mean, least),
        pair(*needed) if needed else "",
        pair(*aim) if aim else "",
        mean >= needed[0] and least >= needed[1] if needed else None,
    )


def kda_lines(run: Run) -> list[Line]:
    lines = []
    random = run.compared("kda_forward_random")
    if random:
        mean = geometric_mean(r["ratio"] for r in random)
        work = f"KDA forward, {len(random)} rows, geometric mean over FlashKDA"
        lines.append(Line(work, f"{mean:.2f} times", "3.2 times", "4 times", mean >= 3.2))
        over = [o["ratio"] for r in random for o in r.get("others", []) if o["name"] == "cuDNN"]
        if over:
            mean, work = geometric_mean(over), f"KDA forward, {len(over)} rows, {OVER_CUDNN}"
            lines.append(Line(work, f"{mean:.2f}; {min(over):.2f}", "1.0", "", mean >= 1.0))
    for label, (needed, aim) in KDA_NEEDED.items():
        work = f"KDA forward, T={label.split(' HV')[0]}"
        lines += time_line(work, run.find("kda_forward_random", label), needed, aim)
    slow = {r["label"]: r["median_ms"] for r in run.suite("kda_forward_slow")}
    pairs = {r["label"]: slow[r["label"]] / r["median_ms"] for r in random if r["label"] in slow}
    for which, is_short, most in (
        ("whose random gates take short transfers", True, 2.0),
        ("whose do not", False, 1.1),
    ):
        if found := [times for label, times in pairs.items() if (label in KDA_SHORT) == is_short]:
            work = f"slow gates beside random, {len(found)} rows {which}, most"
            is_met = max(found) < most + 0.005
            lines.append(Line(work, f"{max(found):.2f} times", f"{most:.2f}", "1.00", is_met))
    row = run.find("kda_forward_softplus", "8192 H=96 HV=96")
    return lines + time_line("KDA forward, T=8192 H=96, softplus gates", row, 1.0, 0.45)


def gdn_lines(run: Run) -> list[Line]:
    lines = []
    rows = run.compared("gdn_forward")
    if rows:
        lines.append(ratio_line("GDN forward", rows, (1.15, 0.85), (1.4, 1.0)))
    for label, needed in GDN_NEEDED.items():
        lines += time_line(f"GDN forward, {label}", run.find("gdn_forward", label), needed, None)
    rows = run.compared("delta_forward")
    if rows:
        mean = 1 / geometric_mean(r["ratio"] for r in rows)
        work = f"DeltaNet forward beside our GDN, {len(rows)} rows, geometric mean"
        lines.append(Line(work, f"{mean:.2f} times", "1.0", "", mean <= 1.005))
    row = run.find("layers", "GDN 8 x 1024, 8 heads, K = V = 64")
    return lines + time_line("GDN forward, B=8 T=1024 H=8 K=V=64", row, 0.1, 0.04)


def growth_lines(run: Run) -> list[Line]:
    lines = []
    for kind in ("GDN", "KDA"):
        rows = [r for r in run.suite("growth") if r["label"].startswith(kind)]
        long = [r["us_per_token"] for r in rows if int(r["label"].split("=")[1]) >= 4096]
        if long:
            # What grows: the longest against the shortest, not a short one that fills no GPU.
            worst = max(later / long[0] for later in long)
            work = f"{kind}, H=16, time per token up to T=131072 beside that at T=4096, most"
            lines.append(Line(work, f"{worst:.2f} times", "1.15", "1.00", worst <= 1.15))
    return lines


def block_lines(run: Run) -> list[Line]:
    lines = []
    rows = run.suite("blocks")
    for name in ("inverse", "beta k k^T"):
        alone = [r for r in rows if r["label"].startswith(name)]
        if alone:
            least = min(alone, key=lambda r: r["copy_percent"])
            work = f"{name} alone, B=8 T=4096, {len(alone)} rows, least of the copy's bandwidth"
            found = f"{least['copy_percent']:.0f} % ({least['label']})"
            lines.append(Line(work, found, "60 %", "85 %", least["copy_percent"] >= 60))
    for row in rows:
        if row["label"].startswith("scores and inverse") and row["ratio"] is not None:
            needed = f"{row['baseline_ms']:.3f} ms ({row['baseline']}, published)"
            floor = f"{floor_ms(row):.3f} ms"
            found = f"{row['median_ms']:.3f} ms"
            lines.append(
                Line(f"KDA {row['label']}", found, needed, "", row["ratio"] >= 1, floor=floor)
            )
    return lines


def decode_lines(run: Run) -> list[Line]:
    """Of the rows with one target the slowest, whatever their gates and layouts."""
    lines = []
    for suite, pattern, needed, aim in DECODE_NEEDED:
        rows = [r for r in run.suite(suite) if re.fullmatch(pattern + r"\b.*", r["label"])]
        if not rows:
            continue
        slowest = max(rows, key=lambda r: r["median_ms"])
        us, floor = 1e3 * slowest["median_ms"], f"{1e3 * floor_ms(slowest):.2f} us"
        work = f"decode, {slowest['label']}"
        if len(rows) > 1:
            work += f", slowest of {len(rows)} rows"
        texts = (f"{us:.2f} us", f"{needed:g} us", f"{aim:g} us")
        lines.append(Line(work, *texts, us <= needed, floor))
    return lines


def step_lines(run: Run) -> list[Line]:
    """Training steps: forward and backward in one time."""
    lines = []
    for label, (needed, aim) in STEPS_NEEDED.items():
        lines += time_line(f"training step, {label}", run.find("train", label), needed, aim)
    for label, (most, aim) in PEAK_NEEDED.items():
        if row := run.find("train", label):
            gib = row["peak_bytes"] * 2.0**-30
            work = f"its memory beyond the inputs, {label}"
            hoped = "" if aim is None else f"{aim} GiB"
            lines.append(Line(work, f"{gib:.2f} GiB", f"{most} GiB", hoped, gib <= most))
    if rows := run.compared("train"):
        lines.append(ratio_line("training steps", rows, None, None))
    return lines


def other_lines(run: Run, folder: Path) -> list[Line]:
    lines = []
    for row in run.compared("options"):
        if row["label"].endswith(", inside"):
            extra = 100 * (1 / row["ratio"] - 1)
            work = f"{row['label']}: gate, norm and sigmoid over the same call without"
            lines.append(Line(work, f"{extra:+.1f} %"))
    for label, (needed, aim) in KDA_BACKWARD_NEEDED.items():
        work = f"KDA gradients, T={label.split(' HV')[0]}"
        lines += time_line(work, run.find("kda_backward", label), needed, aim)
    if rows := run.compared("kda_backward"):
        lines.append(ratio_line("KDA gradients", rows, None, None))
    for suite, (what, least, most) in SUITES_NEEDED.items():
        if rows := [r for r in run.compared(suite) if r["baseline"] != "copy"]:
            lines.append(ratio_line(what, rows, least, most))
    lines += decode_lines(run)
    for row in run.compared("places"):
        times, work = 1 / row["ratio"], f"{row['label']}: time over that of slots in order"
        lines.append(Line(work, f"{times:.2f}", "1.05", "", times <= 1.05))
    for row in run.compared("step"):
        extra = row["median_ms"] * (1 - row["ratio"]) * 1e3
        is_asked = "B=64 T=1 " in row["label"]
        work = f"convolution, decode and norm in one call over decode alone, {row['label']}"
        needed, aim = ("4 us", "2 us") if is_asked else ("", "")
        lines.append(Line(work, f"{extra:+.1f} us", needed, aim, extra <= 4 if is_asked else None))
    for row in run.suite("neighbours"):
        found = f"{row['copy_percent']:.0f} %"
        work = f"{row['label']}, of the copy's bandwidth"
        lines.append(Line(work, found, "80 %", "90 %", row["copy_percent"] >= 80))
    for what, log, most in (("call", "tests", 200), ("training step from a loss", "python", 500)):
        first = first_ms(folder, what, log)
        if first is not None:
            work = f"first {what} in a fresh process, context there"
            lines.append(Line(work, f"{first:.1f} ms", f"{most} ms", "", first <= most))
    return lines


def first_ms(folder: Path, what: str, log: str) -> float | None:
    """What a log says of a first call or step."""
    path = folder / f"{log}.log"
    found = re.findall(rf"first {what}: ([0-9.]+) ms", path.read_text()) if path.exists() else []
    return float(found[-1]) if found else None


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def others_cell(row: Row) -> str:
    return ", ".join(f"{o['ms']:.4f} {o['name']} ({o['ratio']:.2f})" for o in row.get("others", []))


def peaks_cell(row: Row) -> str:
    """Memory of a training step beyond its inputs: ours, and the others' where it is known."""
    if "peak_bytes" not in row:
        return ""
    others = (f"{p['bytes'] * 2.0**-20:.0f} {p['name']}" for p in row.get("others_peak", []))
    text = ", ".join(others)
    return f"{row['peak_bytes'] * 2.0**-20:.0f}" + (f" ({text})" if text else "")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "row": lambda r: r["label"],
    "implementation": lambda r: r["impl"],
    "ms": lambda r: f"{r['median_ms']:.4f}",
    "p10..p90": lambda r: f"{r['p10']:.4f}..{r['p90']:.4f}",
    "TFLOP/s": lambda r: f"{r['gflops'] / 1e3:.1f}",
    "GB/s": lambda r: f"{r['gbps']:.0f}",
    "of a copy": lambda r: f"{r['copy_percent']:.0f} %",
    "peak MiB": peaks_cell,
    "floor ms": lambda r: f"{floor_ms(r):.4f}",
    "ns per token": lambda r: f"{r['us_per_token'] * 1e3:.1f}",
    "other": lambda r: "-" if r["ratio"] is None else f"{r['baseline_ms']:.4f} {r['baseline']}",
    "ratio": lambda r: "-" if r["ratio"] is None else f"{r['ratio']:.2f}",
    "further": others_cell,
}


def suite_text(run: Run, suite: str) -> list[str]:
    rows = run.suite(suite)
    left_out = set() if suite == "growth" else {"ns per token"}
    if not any("others" in r for r in rows):
        left_out.add("further")
    if not any("peak_bytes" in r for r in rows):
        left_out.add("peak MiB")
    columns = {name: f for name, f in COLUMNS.items() if name not in left_out}
    text = [f"## {suite}", ""]
    text.append(table(columns, ([f(r) for f in columns.values()] for r in rows)))
    ratios = sorted((r["ratio"], r["label"]) for r in run.compared(suite))
    if ratios:
        mean = geometric_mean(ratio for ratio, _ in ratios)
        slowest = "; ".join(f"{label} ({ratio:.2f})" for ratio, label in ratios[:3])
        text += ["", f"Geometric mean of the ratios: {mean:.2f}. Slowest: {slowest}."]
    elsewhere = sorted({r["measured"] for r in rows if "measured" in r})
    if elsewhere:
        text += ["", f"Measured before the other suites: {'; '.join(elsewhere)}."]
    errors = [r["errors"].get("o", 0) or 0 for r in rows if r.get("errors")]
    if errors and max(errors) > 0:
        text += ["", f"Largest relative error of o before the times: {100 * max(errors):.2f} %."]
    return text


def tests_text(log: str) -> str:
    """What gtest counted: passed, and failed or skipped where there are any."""
    parts = []
    for word in ("PASSED", "FAILED", "SKIPPED"):
        found = re.findall(rf"^\[ +{word} +\] (\d+ tests?)[.,]", log, re.MULTILINE)
        if found:
            parts.append(f"{found[-1]} {word.lower()}")
    return ", ".join(parts)


def check_lines(folder: Path) -> list[str]:
    """Last lines of the logs of correctness."""

    def last(pattern: str) -> Callable[[str], str]:
        return lambda log: next(reversed(re.findall(pattern, log)), "").strip(" =")

    steps: dict[str, Callable[[str], str]] = {
        "verify": last(r"(.*passed.*)"),
        "tests": tests_text,
        "python": last(r"(.*(?:passed|failed|error).*)"),
    }
    out = []
    for step, text in steps.items():
        log = folder / f"{step}.log"
        if log.exists():
            out.append(f"- {step}: {text(log.read_text()) or 'no summary'}")
    for tool in ("memcheck", "racecheck", "initcheck"):
        log = folder / f"{tool}.log"
        if log.exists():
            found = re.findall(r"SUMMARY: (.*)", log.read_text())
            out.append(f"- compute-sanitizer {tool}: {found[-1] if found else 'no summary'}")
    return out


def read_times(folder: Path) -> dict[str, Any]:
    """times.json of a folder; a ValueError where that is not what bench/gpu.sh leaves."""
    path = folder / "times.json"
    expected = "folder: expected what bench/gpu.sh left, with the step times"
    if not folder.is_dir():
        raise ValueError(f"{expected}, got {folder}, which is no folder")
    if not path.is_file():
        raise ValueError(f"{expected}, got {folder}, which has no times.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{expected}, got {path}, which is no JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise ValueError(f"{expected}, got {path}, which has no cases of deltic bench")
    return document


def load(folder: Path) -> dict[str, Any]:
    """The run's JSON, with what is known of the run itself on top."""
    document = read_times(folder)
    about = folder / "run.json"
    if about.exists():
        said = json.loads(about.read_text(encoding="utf-8"))
        document["command"] = said["command"]
        if said["commit"] != "unknown":  # the library's own is that of the last configuration
            document["commit"] = said["commit"]
    first = first_ms(folder, "call", "tests")
    if first is not None:
        document["first_call_ms"] = first
    return document


def keep_suites(document: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Adds the suites of an earlier run that this one has not; rows say where they are from."""
    measured = {row["suite"] for row in document["cases"]}
    about = f"{earlier.get('date', 'unknown date')} at {earlier.get('commit', 'unknown')}"
    for row in earlier["cases"]:
        if row["suite"] not in measured:
            document["cases"].append({"measured": about, **row})


def page(document: dict[str, Any], folder: Path) -> str:
    run = Run(document)
    machine = document.get("machine", {})
    rates = [r["roof_gbps"] for r in run.rows]
    lines = kda_lines(run) + gdn_lines(run) + growth_lines(run) + block_lines(run)
    lines += step_lines(run) + other_lines(run, folder)
    text = [
        "# H200 benchmarks",
        "",
        "Made by `bench/gpu_table.py` from runs of `bench/gpu.sh`; not edited by hand.",
        "",
        f"Measured: {document.get('date', 'unknown date')}, {machine.get('gpu.0', 'unknown GPU')}, "
        f"driver {machine.get('driver', 'unknown')}; deltic {document.get('version', '')} at "
        f"{document.get('commit', 'unknown')}; CUDA {machine.get('cuda', 'unknown')}; "
        f"`{document.get('command', 'bench/gpu.sh')}`."
        + (f" A copy in the same run: {rates[-1] / 1e3:.2f} TB/s." if rates else ""),
        "",
        "bf16, K = V = 128 unless said. Median of at least 20 replays of a graph of calls, on sets",
        "of tensors that together are three times the L2 cache. Before a row is timed, parts of",
        "its own results are compared with the oracle and a whole sequence with fp32 on the CPU;",
        "a wrong row has no time. The others' times are those of `bench/anchors/h200.json`, same",
        f"kind of GPU, same method. `floor`: the bytes that must move at {COPY_TBPS} TB/s.",
        "Rows `train` are what `delta_rule` does on CUDA tensors that require gradients: forward",
        "keeps nothing, backward starts from the inputs.",
        "",
        table(
            ("work", "measured", "needed", "aim", "floor", "met"), (line.cells() for line in lines)
        ),
        "",
        *check_lines(folder),
    ]
    if run.failed:
        text += ["", f"{len(run.failed)} rows without a time:", ""]
        text += [f"- {r['suite']}: {r['label']}: {r['status']}, {r['reason']}" for r in run.failed]
    left_out = document.get("summary", {}).get("left_out", [])
    if left_out:
        text += ["", "Not measured, of `bench/anchors/h200.json`:", ""]
        text += [f"- {x['op']}, {x['rows']} rows: {x['reason']}" for x in left_out]
    for suite in dict.fromkeys(r["suite"] for r in run.rows):
        text += ["", *suite_text(run, suite)]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what bench/gpu.sh left")
    parser.add_argument(
        "--keep", action="store_true", help="suites that this run has not stay as they are there"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER")
    args = parser.parse_args()
    try:
        document = load(args.folder)
    except ValueError as error:
        print(f"gpu_table.py: {error}", file=sys.stderr)
        return 2
    args.to.mkdir(parents=True, exist_ok=True)
    earlier = args.to / "h200.json"
    if args.keep and earlier.is_file():
        keep_suites(document, json.loads(earlier.read_text(encoding="utf-8")))
    (args.to / "h200.md").write_text(page(document, args.folder), encoding="utf-8")
    (args.to / "h200.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.to}/h200.md and h200.json")
    if args.to == parser.get_default("to"):
        subprocess.run([ROOT / "bench" / "plots.py"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
