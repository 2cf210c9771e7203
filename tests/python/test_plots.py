"""bench/plots.py: README.md's plots are what the results give."""

import json
import subprocess
import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import plots  # noqa: E402


def run_and_anchors():
    run = json.loads((ROOT / "docs" / "benchmarks" / "h200.json").read_text())
    return run, json.loads((ROOT / "bench" / "anchors" / "h200.json").read_text())


def test_the_committed_plots_are_up_to_date():
    command = [sys.executable, ROOT / "bench" / "plots.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_changed_result_shows():
    run, anchors = run_and_anchors()
    before = plots.gpu_plot(run, plots.gpu_strips(run, anchors), plots.THEMES["light"])
    case = next(c for c in run["cases"] if c["suite"] == "gdn_forward")
    case["median_ms"] *= 2
    after = plots.gpu_plot(run, plots.gpu_strips(run, anchors), plots.THEMES["light"])
    assert before != after


def test_the_ratios_are_those_of_the_run():
    """Of FlashInfer's rows the run has its own ratios: from the same two times."""
    run, anchors = run_and_anchors()
    strips = {(s.work, s.other): s.ratios for s in plots.gpu_strips(run, anchors)}
    said = [
        c["ratio"]
        for c in run["cases"]
        if c["suite"] == "gdn_forward" and c["baseline"] == "FlashInfer 0.7.2"
    ]
    drawn = strips["GDN forward", "FlashInfer 0.7.2"]
    assert said and all(min(abs(x / y - 1) for y in drawn) < 1e-6 for x in said)


def test_a_run_without_rows_is_refused():
    run, anchors = run_and_anchors()
    run["cases"] = [{**c, "others": []} for c in run["cases"]]
    with pytest.raises(ValueError, match="expected rows of every strip"):
        plots.gpu_strips(run, anchors)


def test_the_table_of_the_cpu():
    text = (
        "| work | deltic | beside it | result |\n| --- | --- | --- | --- |\n"
        "| a | 47.6 ms (42.8 to 59.1) | fallback 1.5e+03 ms (1 to 2) | 31.4 times faster | x |\n"
        "| b | 3 ms (1 to 2), 20 GB/s | copy 1 ms; fallback 30 ms (1 to 2) | 92 % of the copy |\n"
        "| c | 3 us | our GDN 1 us | 3 times |\n"
    )
    assert plots.times_of(text) == {"a": (47.6, 1500.0, 31.4), "b": (3.0, 30.0, 10.0)}
