#!/usr/bin/env python3
"""Draws README.md's plots as SVG, for light and for dark pages, from the committed results.

  bench/plots.py            writes docs/plots/*.svg
  bench/plots.py --check    fails where a plot is not what its data gives

The GPU's: docs/benchmarks/h200.json beside bench/anchors/h200.json. The CPU's:
docs/benchmarks/cpu.md. A training's losses: docs/benchmarks/training.json, which
examples/python/train_hybrid.py writes.
The standard library alone, so that the same data gives the same bytes everywhere.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from paper import block_of, table_rows  # noqa: E402

# Text, axis, grid, first and second series: contrast of at least 4.5 on white and on GitHub's dark
# page for text, 3 for marks; the two series also differ in lightness, for readers of few colours.
THEMES = {
    "light": {
        "text": "#1f2328",
        "quiet": "#59636e",
        "grid": "#d1d9e0",
        "first": "#0550ae",
        "second": "#bf5700",
    },
    "dark": {
        "text": "#f0f6fc",
        "quiet": "#9198a1",
        "grid": "#3d444d",
        "first": "#58a6ff",
        "second": "#ffb86b",
    },
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
WIDTH = 860


class Strip(NamedTuple):
    """One line of the GPU's plot: times of another project over ours, one per shape."""

    work: str
    other: str
    ratios: list[float]


class Bars(NamedTuple):
    """One group of the CPU's plot, a side per set of instructions."""

    work: str
    sides: list["Side"]


class Side(NamedTuple):
    """Ours and the fallback's time in ms, and how many times ours fits into the other."""

    ours: float
    theirs: float
    ratio: float


class Canvas:
    """Lines of an SVG in the colours of a theme."""

    def __init__(self, theme: dict[str, str]) -> None:
        self.theme = theme
        self.lines: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str = "text",
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{self.theme[color]}" font-size="{size}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, color: str = "grid", width: float = 1
    ) -> None:
        self.lines.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{self.theme[color]}" '
            f'stroke-width="{width:g}"/>'
        )

    def curve(self, points: list[tuple[float, float]], *, color: str, dash: str) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        broken = f' stroke-dasharray="{dash}"' if dash else ""
        self.lines.append(
            f'<path d="M{path}" fill="none" stroke="{self.theme[color]}" '
            f'stroke-width="1.6"{broken}/>'
        )

    def dot(self, x: float, y: float, *, color: str) -> None:
        self.lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{self.theme[color]}" '
            f'fill-opacity="0.55"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, *, color: str) -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{self.theme[color]}"/>'
        )

    def svg(self, height: int, title: str, told: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" font-family="{FONT}">'
        )
        about = f"<title>{escape(title)}</title>\n<desc>{escape(told)}</desc>"
        return "\n".join([head, about, *self.lines, "</svg>"]) + "\n"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# ---- GPU ----------------------------------------------------------------------------------------


def shape_of(case: str) -> tuple[tuple[int, ...], int, int]:
    """Lengths, key heads and value heads of a case line."""
    words = dict(word.split("=", 1) for word in case.split()[1:])
    if "dense" in words:
        batch, tokens = map(int, words["dense"].split("x"))
        lengths = (tokens,) * batch
    else:
        lengths = tuple(map(int, words["seqs"].split(",")))
    return lengths, int(words["H"]), int(words["HV"])


def gpu_strips(run: dict[str, Any], anchors: dict[str, Any]) -> list[Strip]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in run["cases"]:
        if case["status"] == "pass":
            cases.setdefault(case["suite"], []).append(case)

    def baseline(suite: str) -> list[float]:
        return [c["ratio"] for c in cases[suite]]

    def further(suite: str, name: str) -> list[float]:
        found = (o for c in cases[suite] for o in c.get("others", []))
        return [o["ratio"] for o in found if o["name"] == name]

    ours = {shape_of(c["case"]): c["median_ms"] for c in cases["gdn_forward"]}

    # The shapes that all three were measured with, in the same way.
    rows = [row for group in anchors["groups"] for row in group["rows"] if "flashqla" in row]
    shapes = [(tuple(row["seqs"]), row["H"], row["HV"]) for row in rows]

    def gdn(key: str) -> list[float]:
        pairs = zip(rows, shapes, strict=True)
        return [row[key] / ours[shape] for row, shape in pairs if key in row and shape in ours]

    strips = [
        Strip("KDA forward", "FlashKDA", baseline("kda_forward_random")),
        Strip("KDA forward", "cuDNN, all channels decay", further("kda_forward_random", "cuDNN")),
        Strip("KDA forward", "cuDNN, some channels slow", further("kda_forward_slow", "cuDNN")),
        Strip("GDN forward", "FlashInfer 0.7.2", gdn("flashinfer_0_7_2")),
        Strip("GDN forward", "FlashQLA (published)", gdn("flashqla")),
        Strip("GDN forward", "fla 0.5.1 (published)", gdn("fla")),
        Strip("decode", "FlashInfer 0.7.2 or fla", baseline("decode")),
    ]
    empty = [f"{s.work}, {s.other}" for s in strips if not s.ratios]
    if empty:
        raise ValueError(f"h200.json: expected rows of every strip, got none of {empty}")
    return strips


def gpu_plot(run: dict[str, Any], strips: list[Strip], theme: dict[str, str]) -> str:
    canvas = Canvas(theme)
    left, right, top, step = 268, 668, 78, 38
    ratios = [r for s in strips for r in s.ratios]
    low, high = math.log2(min(ratios)) - 0.2, math.log2(max(ratios)) + 0.2

    def x_of(ratio: float) -> float:
        return left + (math.log2(ratio) - low) / (high - low) * (right - left)

    bottom = top + step * len(strips)
    machine = run["machine"]["gpu.0"].split(",")[0]
    title = f"Time of the other project over deltic's, {machine}, bf16, K = V = 128"
    canvas.text(12, 24, title, size=16, bold=True)
    how = "One dot per shape; right of 1: deltic takes less time. Bar: geometric mean."
    canvas.text(12, 44, how, color="quiet")
    canvas.text(right + 14, top - 12, "mean (least to most)", color="quiet", size=12)
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, is_one = x_of(2.0**power), power == 0
        color, width = ("text", 1.5) if is_one else ("grid", 1)
        canvas.line(x, top - 4, x, bottom, color=color, width=width)
        canvas.text(x, bottom + 18, f"{2.0**power:g}x", color="quiet", anchor="middle", size=12)
    for number, strip in enumerate(strips):
        middle = top + step * (number + 0.5)
        color = "second" if strip.work.startswith("decode") else "first"
        canvas.text(12, middle - 2, strip.work, bold=True)
        shapes = f"{strip.other}, {len(strip.ratios)} shapes"
        canvas.text(12, middle + 14, shapes, color="quiet", size=12)
        for i, ratio in enumerate(strip.ratios):
            # Spread over the strip's height by the golden ratio, so that dots do not hide dots.
            canvas.dot(x_of(ratio), middle + 20 * ((i * 0.618034) % 1 - 0.5), color=color)
        mean = geometric_mean(strip.ratios)
        canvas.line(x_of(mean), middle - 14, x_of(mean), middle + 14, color="text", width=3)
        said = f"{mean:.2f} ({min(strip.ratios):.2f} to {max(strip.ratios):.2f})"
        canvas.text(right + 14, middle + 5, said)
    told = "; ".join(
        f"{s.work} beside {s.other}: {geometric_mean(s.ratios):.2f} times, {len(s.ratios)} shapes"
        for s in strips
    )
    return canvas.svg(bottom + 30, title, told)


# ---- CPU ----------------------------------------------------------------------------------------

CPU_ROWS = (
    ("GDN forward, T=4096, fp32", "forward, fp32"),
    ("GDN forward, T=4096, bf16", "forward, bf16"),
    ("GDN forward and backward, T=4096, fp32", "forward + backward, fp32"),
    ("GDN forward and backward, T=4096, bf16", "forward + backward, bf16"),
    ("decode, 16 sequences, 32 heads, fp32 state", "decode of 16 sequences"),
)


def times_of(text: str) -> dict[str, Side]:
    """The rows of a table of cpu.md that have a time of the fallback."""
    found = {}
    for work, cells in table_rows(text).items():
        ours = re.match(r"([\d.e+]+) ms", cells[0])
        theirs = re.search(r"fallback ([\d.e+]+) ms", cells[1])
        if ours and theirs:
            # The page's own ratio, from times before they were rounded; decode's is another.
            said = re.fullmatch(r"([\d.]+) times faster", cells[2])
            pair = float(ours[1]), float(theirs[1])
            found[work] = Side(*pair, float(said[1]) if said else pair[1] / pair[0])
    return found


def cpu_bars(page: Path) -> list[Bars]:
    narrow_text = block_of(page, "avx2")
    wide = times_of(page.read_text(encoding="utf-8").replace(narrow_text, ""))
    narrow = times_of(narrow_text)
    bars = []
    for row, label in CPU_ROWS:
        if row not in wide or row not in narrow:
            raise ValueError(f"{page.name}: expected times of `{row}` in both tables, got none")
        bars.append(Bars(label, [wide[row], narrow[row]]))
    return bars


def short(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def cpu_plot(bars: list[Bars], theme: dict[str, str]) -> str:
    canvas = Canvas(theme)
    left, right, top, step, height = 218, 580, 70, 54, 19
    most = max(side.ratio for group in bars for side in group.sides)
    bottom = top + step * len(bars)
    title = "Times faster than transformers' fallback on a CPU, Gated DeltaNet, T = 4096"
    canvas.text(12, 24, title, size=16, bold=True)
    canvas.bar(12, 40, 12, 12, color="first")
    canvas.text(30, 50, "AVX-512, with AMX for bf16", color="quiet")
    canvas.bar(232, 40, 12, 12, color="second")
    canvas.text(250, 50, "both sides bound to AVX2", color="quiet")
    canvas.line(left, top - 4, left, bottom - 8, color="quiet")
    for number, group in enumerate(bars):
        y = top + step * number
        canvas.text(12, y + 25, group.work, bold=True)
        for i, side in enumerate(group.sides):
            top_of_bar, width = y + i * (height + 2), side.ratio / most * (right - left)
            canvas.bar(left, top_of_bar, width, height, color=("first", "second")[i])
            said = f"{side.ratio:.1f}x: {short(side.ours)} instead of {short(side.theirs)}"
            canvas.text(left + width + 8, top_of_bar + 14, said)
    told = "; ".join(
        f"{g.work}: {g.sides[0].ratio:.1f} times, AVX2 {g.sides[1].ratio:.1f} times" for g in bars
    )
    return canvas.svg(bottom + 6, title, told)


# ---- Training -----------------------------------------------------------------------------------

TRAINED = {"gdn": "Gated DeltaNet", "kda": "Gated DeltaNet and KDA"}
# By operators and device: colour and dashes, so that curves that coincide are seen all the same.
CURVES = {
    "deltic cuda": ("first", ""),
    "deltic cpu": ("second", "7 5"),
    "fallback cuda": ("text", "2 5"),
    "fallback cpu": ("text", "2 5"),
    "fla cuda": ("quiet", "1 3"),
}


def training_plot(run: dict[str, Any], theme: dict[str, str]) -> str:
    canvas = Canvas(theme)
    top, bottom, wide, gap = 78, 300, 360, 60
    models = run["models"]
    everything = [
        loss for model in models.values() for r in model.values() for loss in r.get("losses", [])
    ]
    low, high = math.floor(min(everything)), math.ceil(max(everything))
    sizes = run["sizes"]
    steps = sizes["steps"]
    on = run["machine"].get("gpu", run["machine"]["cpu"])
    title = "Loss of a small Qwen3-Next in training, nats per byte"
    canvas.text(12, 24, title, size=16, bold=True)
    how = f"The same weights and batches everywhere; bf16 products; {on}."
    if sizes["timed_width"]:
        how += f" tokens/s: a step of {sizes['timed_length']}, width {sizes['timed_width']}."
    canvas.text(12, 44, how, color="quiet")
    lines = 0
    for number, (model, results) in enumerate(models.items()):
        left = 40 + number * (wide + gap)

        def place(step: int, loss: float, left: int = left) -> tuple[float, float]:
            return (
                left + step / max(steps - 1, 1) * wide,
                bottom - (loss - low) / (high - low) * (bottom - top),
            )

        canvas.text(left, top - 12, f"{TRAINED[model]}, one layer of attention", bold=True)
        for loss in range(low, high + 1):
            y = place(0, loss)[1]
            canvas.line(left, y, left + wide, y)
            canvas.text(left - 8, y + 4, str(loss), color="quiet", anchor="end", size=12)
        for step in (1, steps):
            x = place(step - 1, low)[0]
            canvas.text(x, bottom + 16, str(step), color="quiet", anchor="middle", size=12)
        for line, (name, found) in enumerate(results.items()):
            color, dash = CURVES[name]
            y = bottom + 40 + 18 * line
            said = found.get("error")
            if said is None:
                canvas.curve(
                    [place(*x) for x in enumerate(found["losses"])], color=color, dash=dash
                )
                rate = found.get("tokens_per_second")
                said = f"{found['losses'][-1]:.3f} at the end"
                said += f", {rate:,.0f} tokens/s" if rate else ""
            canvas.curve([(left, y - 4), (left + 34, y - 4)], color=color, dash=dash)
            canvas.text(left + 42, y, f"{name}: {said}", size=12)
            lines = max(lines, line + 1)
    told = "; ".join(
        f"{TRAINED[model]} on {name}: {found['losses'][0]} to {found['losses'][-1]}"
        for model, results in models.items()
        for name, found in results.items()
        if "losses" in found
    )
    return canvas.svg(bottom + 40 + 18 * lines, title, told)


# ---- Files --------------------------------------------------------------------------------------


def plots() -> dict[str, str]:
    """Every plot by its file's name."""
    run = json.loads((ROOT / "docs/benchmarks/h200.json").read_text(encoding="utf-8"))
    anchors = json.loads((ROOT / "bench/anchors/h200.json").read_text(encoding="utf-8"))
    strips, bars = gpu_strips(run, anchors), cpu_bars(ROOT / "docs/benchmarks/cpu.md")
    training = json.loads((ROOT / "docs/benchmarks/training.json").read_text(encoding="utf-8"))
    found = {}
    for name, theme in THEMES.items():
        found[f"training_{name}.svg"] = training_plot(training, theme)
        found[f"gpu_forward_{name}.svg"] = gpu_plot(run, strips, theme)
        found[f"cpu_{name}.svg"] = cpu_plot(bars, theme)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    folder = ROOT / "docs" / "plots"
    drawn = plots()
    if arguments.check:
        there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
        old = sorted(name for name in drawn | there if drawn.get(name) != there.get(name))
        if old:
            print(f"plots: {', '.join(old)}: not what the results give: run bench/plots.py")
            return 1
        print(f"plots: {len(drawn)} files, all as the results give them")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"plots: {len(drawn)} files in {folder.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
