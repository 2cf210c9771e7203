#!/usr/bin/env python3
"""Writes docs/benchmarks/h200.md, and h200.json beside it, from one run of bench/gpu.sh.

    bench/gpu_table.py FOLDER     # what bench/gpu.sh left: h200.json, verify.log, sanitizer logs

Every time comes from that run; the others' times are those of bench/anchors/h200.json, measured on
the same kind of GPU in the same way (graph replay, cold cache).
"""

import argparse
import json
import math
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KDA_NEEDED = {
    "8192 H=96 HV=96": (0.80, 0.36),
    "8192 H=64 HV=64": (0.65, 0.30),
    "8192 H=32 HV=32": (0.50, 0.20),
    "8192 H=8 HV=8": (0.30, 0.09),
    "32768 H=8 HV=8": (0.80, 0.25),
    "131072 H=4 HV=4": (2.5, 0.50),
}


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else float("nan")


class Run:
    """The rows of a bench run, by suite."""

    def __init__(self, path):
        self.document = json.loads(path.read_text(encoding="utf-8"))
        self.rows = [r for r in self.document["cases"] if "median_ms" in r]

    def suite(self, name):
        return [r for r in self.rows if r["suite"] == name]

    def time(self, suite, label):
        for row in self.suite(suite):
            if row["label"] == label:
                return row["median_ms"]
        return None


def requirement_rows(run):
    """(work, measured, needed, aim, met) of the table on top."""
    out = []

    def add(work, measured, needed, aim, met):
        out.append((work, measured, needed, aim, "yes" if met else "no"))

    random = run.suite("kda_forward_random")
    if random:
        mean = geometric_mean([r["ratio"] for r in random])
        add(
            f"KDA forward, {len(random)} rows, geometric mean over FlashKDA",
            f"{mean:.2f} times",
            "2.0 times",
            "4 times",
            mean >= 2.0,
        )
    for label, (needed, aim) in KDA_NEEDED.items():
        ms = run.time("kda_forward_random", label)
        if ms is not None:
            shape = label.split(" HV")[0]
            add(f"KDA forward, T={shape}", f"{ms:.3f} ms", f"{needed:.2f} ms", f"{aim:.2f} ms",
                ms <= needed)  # fmt: skip
    slow = {r["label"]: r["median_ms"] for r in run.suite("kda_forward_slow")}
    pairs = [slow[r["label"]] / r["median_ms"] for r in random if r["label"] in slow]
    if pairs:
        add(
            "the same rows with slow gates, slowest of them beside random",
            f"{max(pairs):.2f} times",
            "1.10",
            "1.00",
            max(pairs) <= 1.10,
        )
    ms = run.time("kda_forward_softplus", "8192 H=96 HV=96")
    if ms is not None:
        add("KDA forward, T=8192 H=96, softplus gates", f"{ms:.3f} ms", "1.00 ms", "0.45 ms",
            ms <= 1.0)  # fmt: skip
    gdn = run.suite("gdn_forward")
    if gdn:
        mean, least = geometric_mean([r["ratio"] for r in gdn]), min(r["ratio"] for r in gdn)
        add(
            f"GDN forward, {len(gdn)} rows, geometric mean over the best other; least",
            f"{mean:.2f}; {least:.2f}",
            "0.9",
            "1.5; 1.1",
            mean >= 0.9,
        )
    delta = {r["label"]: r["median_ms"] for r in run.suite("delta_forward")}
    pairs = [delta[r["label"]] / r["median_ms"] for r in gdn if r["label"] in delta]
    if pairs:
        mean = geometric_mean(pairs)
        add("DeltaNet forward beside our GDN, geometric mean", f"{mean:.2f} times", "1.0", "",
            mean <= 1.005)  # fmt: skip
    ms = run.time("gpu_layers", "GDN 8 x 1024, 8 heads, K = V = 64")
    if ms is not None:
        add("GDN forward, B=8 T=1024 H=8 K=V=64", f"{ms:.3f} ms", "0.1 ms", "0.04 ms", ms <= 0.1)
    for kind in ("GDN", "KDA"):
        rows = [r for r in run.suite("gpu_growth") if r["label"].startswith(kind)]
        long = [r["us_per_token"] for r in rows if int(r["label"].split("=")[1]) >= 4096]
        if long:
            worst = max(long) / min(long)
            add(f"{kind}, time per token from T=4096 to 131072, H=16", f"{worst:.2f} times",
                "1.15", "1.00", worst <= 1.15)  # fmt: skip
    for row in run.suite("gpu_blocks"):
        percent = 100 * row["gbps"] / row["roof_gbps"]
        add(f"{row['label']}, B=8 T=4096, of the copy's bandwidth", f"{percent:.0f} %", "60 %",
            "85 %", percent >= 60)  # fmt: skip
    return out


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def suite_table(run, suite):
    rows = [
        (
            r["label"],
            r["impl"],
            f"{r['median_ms']:.4f}",
            f"{r['p10']:.4f}..{r['p90']:.4f}",
            f"{r['gflops'] / 1e3:.1f}",
            f"{r['gbps']:.0f}",
            f"{r['roof_percent']:.0f} %",
            "-" if r["ratio"] is None else f"{r['baseline_ms']:.4f} {r['baseline']}",
            "-" if r["ratio"] is None else f"{r['ratio']:.2f}",
        )
        for r in run.suite(suite)
    ]
    header = ("row", "implementation", "ms", "p10..p90", "TFLOP/s", "GB/s", "of the floor", "other",
              "ratio")  # fmt: skip
    return table(header, rows)


def checks(folder):
    """Last lines of the logs of correctness."""
    out = []
    verify = folder / "verify.log"
    if verify.exists():
        out.append(("verify against the oracle", verify.read_text().strip().splitlines()[-1]))
    for tool in ("memcheck", "racecheck", "initcheck"):
        log = folder / f"{tool}.log"
        if log.exists():
            found = re.findall(r"SUMMARY: (.*)", log.read_text())
            out.append((f"compute-sanitizer {tool}", found[-1] if found else "no summary"))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what bench/gpu.sh left")
    args = parser.parse_args()
    run = Run(args.folder / "h200.json")
    machine = run.document.get("machine", {})
    text = [
        "# H200 benchmarks",
        "",
        "Made by `bench/gpu_table.py` from one run of `bench/gpu.sh`; not edited by hand.",
        "",
        f"Measured: {run.document.get('date', 'unknown date')}, "
        f"{machine.get('gpu.0', 'unknown GPU')}, "
        f"driver {machine.get('driver', 'unknown')}; deltic {machine.get('version', '')} at "
        f"{machine.get('commit', '')}; CUDA {machine.get('cuda', '')}.",
        "",
        "bf16, K = V = 128 unless said. Median of at least 21 replays of a graph of 8 calls or",
        "more, on sets of tensors that together are three times the L2 cache. The others' times",
        "are those of `bench/anchors/h200.json`, same kind of GPU, same method. `of the floor`:",
        "the larger of bytes at copy speed and products at 989 TFLOP/s, over the time.",
        "",
        table(("work", "measured", "needed", "aim", "met"), requirement_rows(run)),
        "",
    ]
    for name, line in checks(args.folder):
        text.append(f"- {name}: {line}")
    for suite in dict.fromkeys(r["suite"] for r in run.rows):
        text += ["", f"## {suite}", "", suite_table(run, suite)]
    place = ROOT / "docs" / "benchmarks"
    (place / "h200.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    shutil.copy(args.folder / "h200.json", place / "h200.json")
    print(f"wrote {place.relative_to(ROOT)}/h200.md and h200.json")


if __name__ == "__main__":
    main()
