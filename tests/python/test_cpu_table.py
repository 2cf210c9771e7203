"""bench/cpu_table.py: the page of a CPU run and its section for AVX2, from made-up times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import cpu_table  # noqa: E402
from sources import commit_of  # noqa: E402


def group(name, more=None, **sides):
    times = {side: {"median_ms": ms, "p10": ms, "p90": ms} for side, ms in sides.items()}
    return {"name": name, "sides": times, "impl": "cpu.x", **(more or {})}


def run_of(isa, ours):
    """Times of a run in which the fallback takes 100 ms where it is compared with."""
    memory = {"memory": {"deltic": 10e6, "inputs": 100e6, "fallback": None}}
    groups = []
    for dtype in ("f32", "bf16"):
        groups += [
            group(f"gdn_{dtype}_4096", deltic=ours, fallback=100, more={"difference": {"o": 1e-7}}),
            group(f"kda_{dtype}", kda=12, gdn=10),
            group(f"growth_{dtype}", **{"1024": 10, "4096": 40, "65536": 640}),
            group(f"one_head_{dtype}", **{"1": 16, "2": 10}),
            group(f"train_{dtype}_4096", memory, deltic=ours / 2, fallback=100),
            group(f"backward_{dtype}", **{"backward states": 30, "backward all": 25},
                  forward=10, kda=13, gdn=10),
        ]  # fmt: skip
    for dtype in ("gdn", "train"):
        groups.append(group(f"{dtype}_f32_1024", deltic=ours, fallback=100))
    for sequences in (16, 256):
        sides = {"copy (torch)": 2, "copy (memmove)": 3}
        groups.append(group(f"decode_{sequences}", {"bytes": 1e9}, deltic=1, fallback=50, **sides))
    machine = {"cpu": "A", "features": ["avx2"], "virtual": False, "cores": 2, "threads": 2}
    return {
        "date": "2026-11-16", "version": "0.1.0", "commit": "abc", "machine": machine, "isa": isa,
        "peers": {"torch": "2", "transformers": "5"}, "groups": groups, "agree": True,
        "quick": False,
    }  # fmt: skip


def table_of(run):
    return cpu_table.rows({g["name"]: g for g in run["groups"]}, run["isa"])


@pytest.mark.parametrize(
    ("isa", "ours", "met"), [(None, 20, True), ("avx2", 20, False), ("avx2", 16, True)]
)
def test_what_is_needed_depends_on_the_instructions(isa, ours, met):
    """Five times the fallback is enough with AVX-512 in fp32, six are needed with AVX2."""
    table = table_of(run_of(isa, ours))
    row = next(x for x in table if x[0] == "GDN forward, T=4096, fp32")
    assert (row[3], row[6]) == (f"{100 / ours:.1f} times faster", met)
    assert row[4] == ("6 times" if isa else "4 times")


def test_the_page_keeps_the_section_of_avx2(tmp_path):
    run, narrow = run_of(None, 10), run_of("avx2", 16)
    path = tmp_path / "cpu.md"
    path.write_text(cpu_table.paper(run, table_of(run), "not measured\n"))
    assert cpu_table.block_of(path, "avx2") == "not measured\n"
    cpu_table.replace_block(path, "avx2", cpu_table.avx2_section(narrow, table_of(narrow)))
    section = cpu_table.block_of(path, "avx2")
    assert section.startswith("## AVX2 alone\n\nMeasured: ")
    assert "2 threads, both sides bound to AVX2; deltic" in section and "6.2 times" in section
    before = path.read_text()
    path.write_text(cpu_table.paper(run, table_of(run), cpu_table.block_of(path, "avx2")))
    assert path.read_text() == before
    assert "bound to" not in before.split("<!-- avx2:begin -->")[0]


def test_a_quick_run_writes_nothing(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**run_of("avx2", 16), "quick": True}))
    command = [sys.executable, ROOT / "bench" / "cpu_table.py", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "nothing written" in done.stderr
    done = subprocess.run([*command, "--print"], capture_output=True, text=True)
    assert done.returncode == 0 and "| GDN forward, T=4096, fp32 |" in done.stdout


def test_the_page_in_the_repository_has_the_block():
    assert cpu_table.block_of(ROOT / "docs" / "benchmarks" / "cpu.md", "avx2")


def test_pages_that_a_run_wrote_leave_the_commit_clean(tmp_path):
    assert commit_of(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/cpu.md", "source.cpp"):
        (tmp_path / name).write_text("old\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    found = commit_of(tmp_path)
    assert len(found) == 12 and set(found) <= set("0123456789abcdef")
    for name in ("README.md", "docs/cpu.md", "results.json"):
        (tmp_path / name).write_text("new\n")
    assert commit_of(tmp_path) == found
    (tmp_path / "source.cpp").write_text("new\n")
    assert commit_of(tmp_path) == f"{found}-dirty"
