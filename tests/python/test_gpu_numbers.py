"""bench/gpu_numbers.py: the pages' numbers of an H200 are those of the committed results."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

TOOL = ROOT / "bench" / "gpu_numbers.py"
PAGES = ("README.md", "docs/transformers.md", "docs/python.md")


def run(*arguments, status=0):
    found = subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True
    )
    assert found.returncode == status, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.fixture
def pages(tmp_path):
    """A copy of what it reads and writes."""
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    for name in (*PAGES, "docs/benchmarks/h200.json", "docs/benchmarks/training.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def edit(pages, change):
    path = pages / "docs" / "benchmarks" / "h200.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    for row in list(document["cases"]):
        change(document["cases"], row)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_the_pages_have_the_numbers_of_the_results():
    assert run("--check") == ""


def test_other_results_are_seen_and_written(pages):
    def change(cases, row):
        if row["suite"] == "gdn_forward" and row["ratio"]:
            row["ratio"] *= 2
        if row["suite"] == "train" and row["label"].startswith("DeltaNet"):
            row["median_ms"] /= 2

    edit(pages, change)
    said = run("--check", "--root", pages, status=1)
    assert "README.md: expected" in said and "transformers.md" in said and "python.md" not in said
    before = (pages / "README.md").read_text(encoding="utf-8")
    run("--root", pages)
    assert run("--check", "--root", pages) == ""
    after = (pages / "README.md").read_text(encoding="utf-8")
    numbers = r"([\d.]+) times as fast, geometric mean \(([\d.]+) to ([\d.]+)\)"
    line = rf"GDN forward, \d+ shapes .* {numbers}"
    pairs = zip(*(re.search(line, text).groups() for text in (before, after)), strict=True)
    assert all(abs(float(new) - 2 * float(old)) < 0.02 for old, new in pairs)
    assert before.split("<!-- h200:")[0] == after.split("<!-- h200:")[0]


def test_a_row_that_is_gone_ends_in_a_sentence(pages):
    edit(pages, lambda cases, row: cases.remove(row) if row["suite"] == "neighbours" else None)
    said = run("--root", pages, status=1)
    expected = "h200.json: expected the row 'convolution T=8192' of neighbours"
    assert said.strip() == f"gpu_numbers.py: {expected}"
