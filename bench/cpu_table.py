#!/usr/bin/env python3
"""Writes docs/benchmarks/cpu.md and README.md's numbers and plots from one run of fallback.py.

Every figure comes from that run's JSON; both sides of a ratio were measured in it, interleaved.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from paper import block_of, replace_block, table_rows  # noqa: E402

AVX2 = "avx2"  # the value of --isa, and the name of its block in cpu.md


def ms(group, side):
    return group["sides"][side]["median_ms"]


def short(number):
    """Three digits, and from a thousand on all that stand before the point."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def spread(group, side):
    """Median with the range from the 10th to the 90th percentile."""
    s = group["sides"][side]
    return f"{short(s['median_ms'])} ms ({short(s['p10'])} to {short(s['p90'])})"


# needed and aim of rows beside the fallback, with all instructions and with AVX2 alone.
RATIOS = {
    None: {
        "gdn_f32_4096": (4, 6),
        "gdn_bf16_4096": (6, 15),
        "gdn_f32_1024": (2.5, 5),
        "train_f32_4096": (15, 25),
        "train_bf16_4096": (15, 25),
        "train_f32_1024": (4, 8),
    },
    "avx2": {
        "gdn_f32_4096": (6, 7),
        "gdn_bf16_4096": (6, 7),
        "gdn_f32_1024": (2.5, 5),
        "train_f32_4096": (12, 14),
        "train_bf16_4096": (12, 14),
        "train_f32_1024": (4, 8),
    },
}


def rows(groups, isa=None):
    """(work, ours, the other side, result, needed, aim, met) of every row of the table."""
    out = []

    def ratio_row(name, work):
        needed, aim = RATIOS[isa][name]
        g = groups[name]
        ratio = ms(g, "fallback") / ms(g, "deltic")
        out.append(
            (
                work,
                spread(g, "deltic"),
                "fallback " + spread(g, "fallback"),
                f"{ratio:.1f} times faster",
                f"{needed} times",
                f"{aim} times",
                ratio >= needed,
            )
        )

    ratio_row("gdn_f32_4096", "GDN forward, T=4096, fp32")
    ratio_row("gdn_bf16_4096", "GDN forward, T=4096, bf16")
    ratio_row("gdn_f32_1024", "GDN forward, T=1024, fp32")

    for dtype, needed in (("f32", 1.6), ("bf16", 2.2)):
        g = groups[f"kda_{dtype}"]
        ratio = ms(g, "kda") / ms(g, "gdn")
        out.append(
            (
                f"KDA forward, T=4096, {dtype.replace('f32', 'fp32')}",
                spread(g, "kda"),
                "our GDN " + spread(g, "gdn"),
                f"{ratio:.2f} times our GDN's time",
                f"at most {needed}",
                "1.3",
                ratio <= needed,
            )
        )

    for dtype in ("f32", "bf16"):
        g = groups[f"growth_{dtype}"]
        per_token = {T: 1e3 * ms(g, str(T)) / T for T in (1024, 4096, 65536)}
        for T in (1024, 65536):
            change = per_token[T] / per_token[4096] - 1
            out.append(
                (
                    f"time per token, T={T}, {dtype.replace('f32', 'fp32')}",
                    f"{per_token[T]:.3g} us",
                    f"at T=4096 {per_token[4096]:.3g} us",
                    f"{100 * change:+.0f} %",
                    "within 15 %",
                    "flat",
                    abs(change) <= 0.15,
                )
            )

    for sequences in (16, 256):
        g = groups[f"decode_{sequences}"]
        copy = min(("copy (torch)", "copy (memmove)"), key=lambda side: ms(g, side))
        share = ms(g, copy) / ms(g, "deltic")
        rate = g["bytes"] / ms(g, "deltic") / 1e6
        met = share >= 0.7 and (sequences != 16 or ms(g, "deltic") < 2.0)
        out.append(
            (
                f"decode, {sequences} sequences, 32 heads, fp32 state",
                f"{spread(g, 'deltic')}, {rate:.3g} GB/s",
                f"{copy} {spread(g, copy)}; fallback {spread(g, 'fallback')}",
                f"{100 * share:.0f} % of the copy",
                "70 %, under 2.0 ms" if sequences == 16 else "70 %",
                "90 %",
                met,
            )
        )

    for dtype in ("f32", "bf16"):
        g = groups[f"one_head_{dtype}"]
        many = max(g["sides"], key=int)
        ratio = ms(g, "1") / ms(g, many)
        out.append(
            (
                f"one sequence, one head, T=65536, {dtype.replace('f32', 'fp32')}, {many} threads",
                spread(g, many),
                "one thread " + spread(g, "1"),
                f"{ratio:.2f} times faster",
                "1.5 times",
                "1.9 times",
                ratio >= 1.5,
            )
        )

    ratio_row("train_f32_4096", "GDN forward and backward, T=4096, fp32")
    ratio_row("train_bf16_4096", "GDN forward and backward, T=4096, bf16")
    ratio_row("train_f32_1024", "GDN forward and backward, T=1024, fp32")
    for dtype, needed in (("f32", 0.4), ("bf16", 0.8)):
        m = groups[f"train_{dtype}_4096"]["memory"]
        ratio = m["deltic"] / m["inputs"]
        theirs = "unknown" if m["fallback"] is None else f"{m['fallback'] / 1e6:.0f} MB"
        out.append(
            (
                f"extra memory of that, {dtype.replace('f32', 'fp32')}",
                f"{m['deltic'] / 1e6:.3g} MB",
                f"fallback {theirs}; q, k, v, g, o {m['inputs'] / 1e6:.3g} MB",
                f"{ratio:.2f} times the bytes of q, k, v, g, o",
                f"at most {needed}",
                f"{needed / 2}",
                ratio <= needed,
            )
        )
    for dtype in ("f32", "bf16"):
        g, written = groups[f"backward_{dtype}"], dtype.replace("f32", "fp32")
        for side, needed, aim in (("states", 3.5, 3.0), ("all", 2.8, 2.5)):
            ratio = ms(g, f"backward {side}") / ms(g, "forward")
            out.append(
                (
                    f"GDN backward, T=4096, {written}, keeping {side}",
                    spread(g, f"backward {side}"),
                    "forward " + spread(g, "forward"),
                    f"{ratio:.2f} times the forward's time",
                    f"at most {needed}",
                    f"{aim}",
                    ratio <= needed,
                )
            )
        ratio = ms(g, "kda") / ms(g, "gdn")
        out.append(
            (
                f"KDA forward and backward, T=4096, {written}",
                spread(g, "kda"),
                "our GDN " + spread(g, "gdn"),
                f"{ratio:.2f} times our GDN's time",
                "at most 1.6",
                "1.3",
                ratio <= 1.6,
            )
        )
    return out


def described(run):
    m = run["machine"]
    bound = f", both sides bound to {run['isa'].upper()}" if run.get("isa") else ""
    kind = "virtual machine" if m["virtual"] else "machine"
    return (
        f"{run['date']}, {m['cpu']} ({', '.join(m['features'])}), {kind} with {m['cores']} cores, "
        f"{m['threads']} threads{bound}; deltic {run['version']} at {run['commit']}; torch "
        f"{run['peers']['torch']}, transformers {run['peers']['transformers']}"
    )


def paper(run, table, avx2):
    """The whole page; `avx2`: the section of a run with AVX2 alone."""
    lines = [
        "# CPU benchmarks",
        "",
        "Made by `bench/cpu_table.py` from runs of `bench/peers/run.sh`; not edited by hand.",
        "",
        "K = V = 128 and 16 heads unless said. Medians of interleaved rounds in one process, in",
        "brackets the 10th and 90th percentile. The fallback is `torch_chunk_gated_delta_rule`",
        "(decode: `torch_recurrent_gated_delta_rule`) of transformers, on the same tensors; both",
        "sides normalise q and k inside. The copy moves the bytes that decode must move: the pool",
        "once in, once out. Backward beside autograd through the same function; its memory is what",
        "the process grows by at most, ours the saved bytes and the workspace.",
        "",
        *results(run, table),
        "",
        f"<!-- {AVX2}:begin -->",
        *avx2.splitlines(),
        f"<!-- {AVX2}:end -->",
    ]
    return "\n".join(lines) + "\n"


def avx2_section(run, table):
    """What most desktops and many servers have."""
    return "\n".join(["## AVX2 alone", "", *results(run, table)])


def results(run, table):
    """The lines of one run: where, the table, and how far both sides differ."""
    groups = {g["name"]: g for g in run["groups"]}
    lines = [
        f"Measured: {described(run)}.",
        "",
        "| work | deltic | beside it | result | needed | aim | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join(row[:6])} | {'yes' if row[6] else 'no'} |" for row in table]
    lines += [
        "",
        "Differences, `rms(ours - theirs) / rms(theirs)`, of outputs or gradients, and what ran:",
        "",
        "| case | implementation | difference |",
        "| --- | --- | --- |",
    ]
    for name, g in groups.items():
        if "difference" in g:
            grad = "d" if name.startswith("train") else ""
            each = ", ".join(f"{grad}{key} {value:.1e}" for key, value in g["difference"].items())
            lines.append(f"| {name} | `{g['impl']}` | {each} |")
    return lines


README_ROWS = (
    "GDN forward, T=4096, fp32",
    "GDN forward, T=4096, bf16",
    "GDN forward, T=1024, fp32",
    "KDA forward, T=4096, fp32",
    "KDA forward, T=4096, bf16",
    "GDN forward and backward, T=4096, fp32",
    "GDN forward and backward, T=4096, bf16",
    "extra memory of that, fp32",
    "GDN forward and backward, T=1024, fp32",
    "decode, 16 sequences, 32 heads, fp32 state",
    "decode, 256 sequences, 32 heads, fp32 state",
)


def readme_block(page):
    """The rows that matter most, both runs of the page side by side, without the spreads."""

    def medians(cell):
        cell = re.sub(r" \([^()]* to [^()]*\)", "", cell)
        return re.sub(r"[\d.]+e\+\d+", lambda found: short(float(found[0])), cell)

    narrow_text = block_of(page, AVX2)
    wide_text = page.read_text(encoding="utf-8").replace(narrow_text, "")
    wide, narrow = table_rows(wide_text), table_rows(narrow_text)
    measured, narrowly = (
        found[1] if (found := re.search(r"^Measured: (.*)$", text, re.MULTILINE)) else ""
        for text in (wide_text, narrow_text)
    )
    lines = [measured]
    if narrowly:  # another day, and maybe another machine
        lines += ["", f"The last column: {narrowly}"]
    lines += [
        "",
        "| work | deltic | beside it | result | both with AVX2 alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for work in README_ROWS:
        ours, other, result = (medians(cell) for cell in wide[work][:3])
        least = "not measured"
        if work in narrow:
            least = f"{medians(narrow[work][0])}: {medians(narrow[work][2])}"
        lines.append(f"| {work} | {ours} | {other} | {result} | {least} |")
    lines += [
        "",
        "All rows, their spread and how they were measured:",
        "[docs/benchmarks/cpu.md](docs/benchmarks/cpu.md).",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="JSON of bench/peers/fallback.py")
    parser.add_argument("--print", action="store_true", help="print the table, write nothing")
    args = parser.parse_args()
    run = json.loads(args.run.read_text())
    is_avx2 = run.get("isa") == AVX2
    table = rows({g["name"]: g for g in run["groups"]}, run.get("isa"))
    if args.print:
        print("\n".join(results(run, table)))
        return 0
    if run["quick"] or not run["agree"]:
        print("cpu_table: a quick run, or outputs that differ: nothing written", file=sys.stderr)
        return 1
    path = ROOT / "docs" / "benchmarks" / "cpu.md"
    if is_avx2:
        replace_block(path, AVX2, avx2_section(run, table))
    else:
        path.write_text(paper(run, table, block_of(path, AVX2)))
    replace_block(ROOT / "README.md", "numbers", readme_block(path))
    subprocess.run([ROOT / "bench" / "plots.py"], check=True)
    missed = [row[0] for row in table if not row[6]]
    print(f"cpu_table: {len(table)} rows, {len(missed)} below what is needed {missed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
