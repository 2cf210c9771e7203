#!/usr/bin/env python3
"""Fills the numbers of an H200 in README.md, docs/transformers.md and docs/python.md.

    bench/gpu_numbers.py            writes the blocks
    bench/gpu_numbers.py --check    fails where one is not what its data gives

The data: docs/benchmarks/h200.json, which bench/gpu_table.py writes, and training.json beside it,
which examples/python/train_hybrid.py writes. Standard library alone.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]
from gpu_table import Row, Run, geometric_mean, table  # noqa: E402
from paper import block_of, replace_block  # noqa: E402

Line = tuple[str, str, str, str]


def times(x: float) -> str:
    """A ratio, with the digits that a reader can use."""
    return f"{x:.2f}" if x < 10 else f"{x:.0f}"


def ms(x: float) -> str:
    return f"{x:.3f} ms" if x < 1 else f"{x:.2f} ms" if x < 10 else f"{x:.1f} ms"


def mean(rows: list[Row]) -> float:
    return geometric_mean(r["ratio"] for r in rows)


def least_to_most(rows: list[Row]) -> str:
    ratios = [r["ratio"] for r in rows]
    return f"{times(min(ratios))} to {times(max(ratios))}"


def beside(rows: list[Row], other: str) -> list[float]:
    """The ratios to another project in the rows that have one."""
    found = [(o["name"], o["ratio"]) for r in rows for o in r.get("others", [])]
    found += [(r["baseline"], r["ratio"]) for r in rows]
    return [ratio for name, ratio in found if name == other]


def of_suites(run: Run, needed: Iterable[tuple[str, str]]) -> dict[str, Row]:
    """Rows by suite and label; a row that the run has not ends the program in a sentence."""
    found = {}
    for suite, label in needed:
        row = run.find(suite, label)
        if row is None:
            raise SystemExit(f"gpu_numbers.py: h200.json: expected the row {label!r} of {suite}")
        found[label] = row
    return found


def kda_forward(run: Run) -> list[Line]:
    random, slow = run.compared("kda_forward_random"), run.compared("kda_forward_slow")
    wide, narrow = "8192 H=96 HV=96", "8192 H=8 HV=8"
    long = "131072 H=4 HV=4"
    rows = of_suites(run, (("kda_forward_random", x) for x in (wide, narrow, long)))
    a, b, c = (rows[x] for x in (wide, narrow, long))
    dnn, dnn_slow = beside(random, "cuDNN"), beside(slow, "cuDNN")
    quicker = sum(x < 1 for x in dnn)
    return [
        (
            f"KDA forward, {len(random)} shapes, bounded gates; with slow channels",
            "",
            "FlashKDA",
            f"{times(mean(random))}; {times(mean(slow))} times as fast, geometric mean",
        ),
        (
            "KDA forward, T=8192, 96 heads; 8 heads",
            f"{ms(a['median_ms'])}; {ms(b['median_ms'])}",
            f"FlashKDA {ms(a['baseline_ms'])}; {ms(b['baseline_ms'])}",
            f"{times(a['ratio'])}; {times(b['ratio'])} times as fast",
        ),
        (
            f"KDA forward, {len(dnn)} of these shapes",
            "",
            "cuDNN",
            f"{times(geometric_mean(dnn))} times as fast ({times(min(dnn))} to {times(max(dnn))}; "
            f"cuDNN is faster in {quicker}), {times(geometric_mean(dnn_slow))} times with slow "
            "channels",
        ),
        (
            "KDA forward, T=131072, 4 heads",
            ms(c["median_ms"]),
            f"FlashKDA {ms(c['baseline_ms'])}",
            f"{times(c['ratio'])} times as fast",
        ),
    ]


def training(run: Run) -> list[Line]:
    kda, gdn, steps = (run.compared(x) for x in ("kda_backward", "gdn_backward", "train"))
    step = "KDA 8192 H=96 HV=96 bounded, random"
    needed = (
        ("kda_backward", "8192 H=96 HV=96 random"),
        ("gdn_backward", "8192 H=16 HV=32"),
        ("train", step),
    )
    a, b, c = of_suites(run, needed).values()
    peak = next((p["bytes"] for p in c.get("others_peak", []) if p["name"] == c["baseline"]), None)
    others = f"{c['baseline']} {ms(c['baseline_ms'])}"
    if peak is not None:
        others += f", {peak * 2.0**-30:.2f} GiB"
    return [
        (
            f"KDA gradients, {len(kda)} rows, fp32 log decay",
            f"{ms(a['median_ms'])} at T=8192 with 96 heads",
            f"cuDNN ({ms(a['baseline_ms'])})",
            f"{times(mean(kda))} times as fast, geometric mean ({least_to_most(kda)})",
        ),
        (
            f"GDN gradients, {len(gdn)} shapes",
            f"{ms(b['median_ms'])} at T=8192 with 16/32 heads",
            f"FlashQLA as published ({ms(b['baseline_ms'])})",
            f"{times(mean(gdn))} times as fast, geometric mean ({least_to_most(gdn)})",
        ),
        (
            "KDA forward and gradients, T=8192, 96 heads, bounded gate, norms and sigmoid inside",
            f"{ms(c['median_ms'])}, {c['peak_bytes'] * 2.0**-30:.2f} GiB beyond the inputs",
            others,
            f"{times(c['ratio'])} times as fast",
        ),
        (
            f"forward and gradients, {len(steps)} rows",
            "",
            "the best other for each",
            f"{times(mean(steps))} times as fast, geometric mean ({least_to_most(steps)})",
        ),
    ]


def model_line(data: dict[str, Any]) -> Line:
    runs = data["models"]["gdn"]
    ours, theirs = (runs[x]["tokens_per_second"] for x in ("deltic cuda", "fallback cuda"))
    return (
        "training step of a small Qwen3-Next ([docs/transformers.md](docs/transformers.md))",
        f"{ours:,.0f} tokens/s",
        f"transformers' fallback, {theirs:,.0f}",
        f"{times(ours / theirs)} times as fast",
    )


def readme(run: Run, data: dict[str, Any]) -> str:
    gdn, decode = run.compared("gdn_forward"), run.compared("decode")
    tokens = [r for r in run.compared("decode_tokens") if r["baseline"] != "copy"]
    label = "scores and inverse, B=4 T=8192 H=32 K=128 f16"
    scores = of_suites(run, [("blocks", label)])[label]
    inverse = [r["copy_percent"] for r in run.suite("blocks") if r["label"].startswith("inverse")]
    lines = kda_forward(run)
    lines.append(
        (
            f"GDN forward, {len(gdn)} shapes",
            "",
            "the best of FlashInfer, FlashQLA and fla for each",
            f"{times(mean(gdn))} times as fast, geometric mean ({least_to_most(gdn)})",
        )
    )
    lines += training(run)
    lines += [
        (
            "KDA scores with inverse, fp16, B=4 T=8192 H=32",
            ms(scores["median_ms"]),
            f"fla {ms(scores['baseline_ms'])} (published)",
            f"{times(scores['ratio'])} times as fast",
        ),
        (
            f"`(I + A)^-1`, B=8 T=4096, {len(inverse)} shapes, fp32 and bf16",
            "",
            "a copy of the same bytes",
            f"{min(inverse):.0f} to {max(inverse):.0f} % of its bandwidth",
        ),
        (
            f"decode, {len(decode)} shapes",
            "",
            "the best other for each",
            f"{times(mean(decode))} times as fast, geometric mean ({least_to_most(decode)}; the "
            f"least {min(decode, key=lambda r: r['ratio'])['label']})",
        ),
        (
            f"decode of several tokens, {len(tokens)} shapes",
            "",
            "FlashInfer",
            f"{times(mean(tokens))} times as fast, geometric mean ({least_to_most(tokens)})",
        ),
        model_line(data),
    ]
    work = {
        "the causal convolution": "convolution T=8192",
        "its gradient": "its gradient T=8192",
        "its step of 256 sequences": "its step, 256 sequences kv",
        "the gated norm": "gated norm T=8192",
        "the norm's gradient": "its gradient T=8192, norm",
        "states moved from pool to pool": "states moved, fp32",
    }
    rows = of_suites(run, (("neighbours", x) for x in work.values()))
    shares = [f"{what} {rows[label]['copy_percent']:.0f} %" for what, label in work.items()]
    machine, document = run.document["machine"], run.document
    about = textwrap.fill(
        f"On one NVIDIA H200, {document['date']}, driver {machine['driver']}, CUDA "
        f"{machine['cuda'].split(',')[0]}, bf16, K = V = 128, graph replay, every row checked "
        "before it was timed; the other projects' times are from the same kind of GPU "
        f"([docs/benchmarks/h200.md](docs/benchmarks/h200.md) has all {len(run.rows)} rows, the "
        "slow ones too, and says which were measured at an earlier commit):",
        118,
        break_on_hyphens=False,
    )
    header = ("work", "deltic", "beside it", "result: above 1, deltic is faster")
    copied = textwrap.fill(f"Share of a copy's bandwidth: {', '.join(shares)}.", 118)
    return "\n\n".join((about, table(header, lines), copied))


def against_fla(run: Run, _: dict[str, Any]) -> str:
    """Training steps beside flash-linear-attention, time and memory."""
    rows = []
    for r in run.suite("train"):
        named = [*r.get("others", []), {"name": r["baseline"], "ms": r["baseline_ms"]}]
        theirs = next((o["ms"] for o in named if o["name"] == "fla"), None)
        if theirs is None:
            continue
        peaks = (p["bytes"] for p in r.get("others_peak", []) if p["name"] == "fla")
        peak = next((f"{p * 2.0**-20:,.0f} MiB" for p in peaks), "")
        ours = f"{r['peak_bytes'] * 2.0**-20:,.0f} MiB"
        ratio = times(theirs / r["median_ms"])
        cells = (r["label"], ms(theirs), ms(r["median_ms"]), ratio, peak, ours)
        rows.append(cells)
    if not rows:
        raise SystemExit("gpu_numbers.py: h200.json: expected rows of `train` beside fla")
    header = ("call", "fla", "deltic", "times", "fla, memory beyond the inputs", "deltic")
    return table(header, rows)


def model_steps(_: Run, data: dict[str, Any]) -> str:
    """Training steps of a model, by the operators that its layers run on."""
    plain, mixed = data["models"]["gdn"], data["models"]["kda"]
    fallback = plain["fallback cuda"]["tokens_per_second"]

    def cell(runs: dict[str, Any], name: str) -> str:
        found = runs.get(name, {})
        rate = found.get("tokens_per_second")
        return f"{rate:,.0f}" if rate else str(found.get("error", "not measured"))

    rows = []
    for name, operators in OPERATORS.items():
        rate = plain.get(name, {}).get("tokens_per_second")
        over = times(rate / fallback) if rate else ""
        with_kda = "has none" if name == "fallback cuda" else cell(mixed, name)
        rows.append((operators, cell(plain, name), over, with_kda))
    header = ("operators", "tokens per second", "over the fallback", "one of the three a KDA layer")
    return table(header, rows)


def python_limits(run: Run, _: dict[str, Any]) -> str:
    needed = (
        ("kda_forward_random", "8192 H=96 HV=96"),
        ("kda_backward", "8192 H=96 HV=96 random"),
    )
    forward, backward = (r["median_ms"] for r in of_suites(run, needed).values())
    return textwrap.fill(
        "Limits on GPUs: the gradients of `delta_rule` and `recurrent` use tensor cores for bf16 "
        "and fp16 with K and V of 64 or 128 and chunks of 64 (H200, KDA, T = 8192, 96 heads, K = V "
        f"= 128: forward {ms(forward)}, backward {ms(backward)}); those of other calls are as "
        "exact, but take 17 to 39 times as long.",
        118,
    )


OPERATORS = {
    "fallback cuda": "transformers' fallback",
    "fla cuda": "flash-linear-attention",
    "deltic cuda": "deltic",
}
# Page and block: what fills it.
BLOCKS: dict[tuple[str, str], Callable[[Run, dict[str, Any]], str]] = {
    ("README.md", "h200"): readme,
    ("docs/transformers.md", "h200"): against_fla,
    ("docs/transformers.md", "training"): model_steps,
    ("docs/python.md", "h200"): python_limits,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="of the pages")
    given = parser.parse_args()
    folder = given.root / "docs" / "benchmarks"
    run = Run(json.loads((folder / "h200.json").read_text(encoding="utf-8")))
    data = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    wrong = []
    for (page, block), fill in BLOCKS.items():
        path, text = given.root / page, fill(run, data) + "\n"
        if not given.check:
            replace_block(path, block, text)
        elif block_of(path, block) != text:
            wrong.append(page)
    for page in wrong:
        print(f"gpu_numbers.py: {page}: expected the results' numbers: run bench/gpu_numbers.py")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
