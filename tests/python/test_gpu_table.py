"""bench/gpu_table.py: the page of a GPU run, from a small made-up one; bench/gpu.sh's arguments."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOOL = BENCH / "gpu_table.py"


def row(suite, label, ms, **more):
    """A row of `deltic bench --json` with plain numbers."""
    base = {
        "suite": suite,
        "label": label,
        "impl": "cuda.sm90.forward",
        "status": "pass",
        "reason": "",
        "errors": {"o": 0.0041},
        "median_ms": ms,
        "p10": ms,
        "p90": ms,
        "gflops": 1e5,
        "gbps": 2000.0,
        "roof_gbps": 4270.0,
        "copy_percent": 50.0,
        "bytes": 4.27e8,
        "us_per_token": ms / 8.192,
        "baseline": None,
        "baseline_ms": None,
        "ratio": None,
    }
    return {**base, **more}


def against(name, other, ms):
    return {"baseline": name, "baseline_ms": other, "ratio": other / ms}


ROWS = [
    row("kda_forward_random", "8192 H=96 HV=96", 0.7, **against("FlashKDA", 1.4, 0.7),
        others=[{"name": "cuDNN", "ms": 1.408, "ratio": 1.408 / 0.7}]),
    row("kda_forward_random", "8192 H=8 HV=8", 0.2, **against("FlashKDA", 1.6, 0.2)),
    row("kda_forward_slow", "8192 H=96 HV=96", 0.84, **against("FlashKDA", 1.4, 0.84)),
    row("kda_forward_slow", "8192 H=8 HV=8", 0.4008, **against("FlashKDA", 1.6, 0.4008)),
    row("gdn_forward", "8 x 1024 H=16 HV=32", 0.1255, **against("FlashInfer 0.7.2", 0.1, 0.1255)),
    row("gdn_forward", "32768 H=2 HV=8", 0.239, **against("FlashInfer 0.7.2", 0.239, 0.239)),
    row("gdn_forward", "8192 H=16 HV=32", 0.25, **against("FlashInfer 0.7.2", 0.2, 0.25)),
    row("delta_forward", "8192 H=16 HV=32", 0.2, **against("GDN", 0.25, 0.2)),
    row("kda_backward", "8192 H=96 HV=96 slow", 4.0, **against("cuDNN", 3.75, 4.0)),
    row("gdn_backward", "8192 H=16 HV=32", 1.0, **against("FlashQLA", 0.8, 1.0),
        others=[{"name": "FlashQLA 0.1.3", "ms": 0.82, "ratio": 0.82}]),
    row("growth", "KDA forward T=4096", 0.2, us_per_token=0.05),
    row("growth", "KDA forward T=131072", 3.8, us_per_token=0.029),
    row("growth", "GDN forward T=4096", 0.2, us_per_token=0.05),
    row("growth", "GDN forward T=131072", 8.0, us_per_token=0.061),
    row("blocks", "inverse 16 H=16 f32", 0.1, copy_percent=61.0),
    row("blocks", "inverse 64 H=16 f32", 0.1, copy_percent=40.0),
    row("blocks", "scores and inverse, B=4 T=8192 H=32 K=128 f16", 1.0,
        **against("fla", 2.356, 1.0)),
    row("layers", "GDN 8 x 1024, 8 heads, K = V = 64", 0.05, **against("fla", 0.534, 0.05)),
    row("decode", "GDN B=64 fp32 K-first", 0.069, **against("FlashInfer 0.7.2", 0.069, 0.069)),
    row("decode", "KDA B=64 fp32 V-first", 0.070, **against("fla", 0.07, 0.07)),
    row("decode", "KDA B=1 bf16 V-first raw gate", 0.00265, **against("fla", 0.01, 0.00265)),
    row("decode_tokens", "GDN B=64 fp32 V-first 4 tokens", 0.1,
        **against("FlashInfer 0.7.2", 0.09, 0.1)),
    row("decode_tokens", "GDN B=64 bf16 V-first 8 tokens, not kept", 0.1,
        **against("copy", 0.02, 0.1)),
    row("places", "GDN B=256 V-first, pages from the last, f32", 0.3,
        **against("slots in order", 0.27, 0.3)),
    row("kda_backward", "8192 H=32 HV=32 random", 1.0),
    row("train", "KDA 8192 H=96 HV=96 bounded, random", 4.2,
        **against("cuDNN with torch", 5.78, 4.2),
        others=[{"name": "fla", "ms": 12.4, "ratio": 12.4 / 4.2}], peak_bytes=2 * 2**30,
        others_peak=[{"name": "fla", "bytes": 6233 * 2**20}]),
    row("train", "KDA 8192 H=96 HV=96 bounded, slow", 4.0, **against("fla", 8.0, 4.0),
        peak_bytes=3 * 2**30),
    row("train", "KDA 8192 H=32 HV=32 bounded, random", 1.5, **against("fla", 5.791, 1.5),
        peak_bytes=700 * 2**20),
    row("neighbours", "convolution T=8192", 0.075, copy_percent=84.0),
    row("neighbours", "its step, 256 sequences kv", 0.014, copy_percent=58.0),
    row("options", "KDA T=8192 H=96, inside", 0.7, **against("computed before", 0.63, 0.7)),
]  # fmt: skip
FAILED = {
    "suite": "gdn_forward",
    "label": "32768 H=2 HV=8",
    "status": "fail",
    "reason": "o: error 0.2 above the budget 0.006",
}


def printed(file, words, *values):
    """The line that a test of this tree prints: its text with these values for its fields."""
    (text,) = re.findall(rf'"({words}[^"]*)"', (BENCH.parent / "tests" / file).read_text())
    given = iter(values)
    return re.sub(r"{[^}]*}|%[.0-9]*f", lambda _: next(given), text.replace("\\n", "")) + "\n"


FIRST_STEPS = [
    printed("python/test_cuda_training.py", "first training step", start, ms)
    for start, ms in (("loss", "612.5"), ("gradient", "1612.5"))
]
TESTS_LOG = (
    printed("gpu_test.cpp", "first call", "2.1")
    + """[==========] 18 tests from 2 test suites ran. (269 ms total)
[  PASSED  ] 16 tests.
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] Gpu.SameBitsTwice
"""
)


@pytest.fixture
def made(tmp_path):
    """The page and the JSON that the tool makes of the rows."""
    source, to = tmp_path / "run", tmp_path / "docs"
    source.mkdir()
    document = {
        "date": "2026-11-15",
        "version": "0.1.0",
        "commit": "old",
        "machine": {"gpu.0": "NVIDIA H200", "driver": "580.1", "cuda": "13.0, sm_90a"},
        "cases": [*ROWS, FAILED],
        "summary": {"left_out": [{"op": "delta_train", "rows": 1, "reason": "not there"}]},
    }
    (source / "times.json").write_text(json.dumps(document))
    (source / "run.json").write_text('{"commit": "abc123", "command": "bench/gpu.sh times"}')
    (source / "tests.log").write_text(TESTS_LOG)
    steps = "".join(f".{line}" for line in FIRST_STEPS)
    (source / "python.log").write_text(f"..{steps}.\n4 passed in 2.00s\n")
    (source / "verify.log").write_text("138 passed, 0 failed, 3 skipped\n")
    (source / "racecheck.log").write_text("========= RACECHECK SUMMARY: 0 hazards displayed\n")
    command = [sys.executable, str(TOOL), str(source), "--to", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (to / "h200.md").read_text(), json.loads((to / "h200.json").read_text())


def cells(page, start):
    """The cells of the first table line that starts so."""
    line = next(x for x in page.splitlines() if x.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_summary(made):
    page, _ = made
    for start, measured, met in (
        ("KDA forward, 2 rows", "4.00 times", "yes"),
        ("KDA forward, T=8192 H=96 ", "0.700 ms", "no"),
        ("KDA forward, T=8192 H=8 ", "0.200 ms", "no"),
        ("KDA forward, 1 rows, geometric mean over cuDNN", "2.01; 2.01", "yes"),
        ("slow gates beside random, 1 rows whose random", "2.00 times", "yes"),
        ("slow gates beside random, 1 rows whose do not", "1.20 times", "no"),
        ("GDN forward, 3 rows", "0.86; 0.80", "no"),
        ("GDN forward, 8 x 1024 H=16 HV=32", "0.126 ms", "no"),
        ("GDN forward, 32768 H=2 HV=8", "0.239 ms", "yes"),
        ("DeltaNet forward beside our GDN", "0.80 times", "yes"),
        ("GDN forward, B=8 T=1024", "0.050 ms", "yes"),
        ("KDA, H=16, time per token", "1.00 times", "yes"),
        ("GDN, H=16, time per token", "1.22 times", "no"),
        ("inverse alone", "40 % (inverse 64 H=16 f32)", "no"),
        ("KDA scores and inverse", "1.000 ms", "yes"),
        ("KDA T=8192 H=96, inside", "+11.1 %", ""),
        ("KDA gradients, 1 rows", "0.94; 0.94", ""),
        ("GDN gradients, 1 rows", "0.80; 0.80", "no"),
        ("KDA gradients, T=8192 H=32 ", "1.000 ms", "yes"),
        ("training step, KDA 8192 H=96 HV=96 bounded, random", "4.200 ms", "no"),
        ("training step, KDA 8192 H=32 HV=32 bounded, random", "1.500 ms", "yes"),
        ("its memory beyond the inputs, KDA 8192 H=96 HV=96 bounded, random", "2.00 GiB", "yes"),
        ("its memory beyond the inputs, KDA 8192 H=96 HV=96 bounded, slow", "3.00 GiB", "no"),
        ("training steps, 3 rows", "2.20; 1.38", ""),
        ("convolution T=8192", "84 %", "yes"),
        ("its step", "58 %", "no"),
        ("decode of several tokens, 1 rows", "0.90; 0.90", ""),
        ("first call", "2.1 ms", "yes"),
        ("first training step", "612.5 ms", "no"),
        ("decode, KDA B=64 fp32 V-first, slowest of 2 rows", "70.00 us", "no"),
        ("decode, KDA B=1 bf16 V-first raw gate", "2.65 us", "yes"),
        ("decode, GDN B=64 fp32 V-first 4 tokens", "100.00 us", "no"),
    ):
        found = cells(page, start)
        assert (found[1], found[-1]) == (measured, met), start
    assert cells(page, "KDA forward, T=8192 H=96 ")[2:5] == ["0.60 ms", "0.36 ms", "0.100 ms"]
    assert cells(page, "GDN forward, 8 x 1024 H=16 HV=32")[2:4] == ["0.125 ms", ""]


def test_the_suites(made):
    page, _ = made
    found = cells(page, "8192 H=96 HV=96")
    assert "1.4000 FlashKDA" in found and "2.00" in found
    assert "1.4080 cuDNN (2.01)" in found
    assert "0.8200 FlashQLA 0.1.3 (0.82)" in page
    assert "2048 (6233 fla)" in cells(page, "KDA 8192 H=96 HV=96 bounded, random")
    assert "700" in cells(page, "KDA 8192 H=32 HV=32 bounded, random")
    assert page.count("| peak MiB |") == 1
    assert "Geometric mean of the ratios: 4.00. Slowest: 8192 H=96 HV=96 (2.00)" in page
    assert "Largest relative error of o before the times: 0.41 %" in page
    assert "29.0" in cells(page, "KDA forward T=131072")
    assert "- gdn_forward: 32768 H=2 HV=8: fail, o: error 0.2 above the budget" in page
    assert "of `bench/anchors/h200.json`:\n\n- delta_train, 1 rows: not there\n" in page
    assert "138 passed" in page and "0 hazards" in page
    assert "- tests: 16 tests passed, 2 tests failed\n" in page
    assert "- python: 4 passed in 2.00s\n" in page


def test_where_it_comes_from(made):
    page, document = made
    for text in ("NVIDIA H200", "driver 580.1", "abc123", "`bench/gpu.sh times`", "4.27 TB/s"):
        assert text in page, text
    assert document["commit"] == "abc123" and document["command"] == "bench/gpu.sh times"
    assert document["first_call_ms"] == 2.1 and len(document["cases"]) == len(ROWS) + 1


def test_suites_of_an_earlier_run_are_kept(made, tmp_path):
    """With --keep; their sections, and no others, say where they are from."""
    source, to = tmp_path / "run", tmp_path / "docs"
    document = json.loads((source / "times.json").read_text())
    document["cases"] = [row("growth", "KDA forward T=4096", 0.1)]
    (source / "times.json").write_text(json.dumps(document))
    (source / "run.json").write_text('{"commit": "def456", "command": "bench/gpu.sh times"}')
    command = [sys.executable, str(TOOL), str(source), "--keep", "--to", str(to)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    page = (to / "h200.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    kept = "Measured before the other suites: 2026-11-15 at abc123."
    assert kept not in sections["growth"] and "0.1000" in sections["growth"]
    assert kept in sections["gdn_forward"] and kept in sections["kda_backward"]
    assert "def456" in page.split("\n## ")[0]


def refused(*command):
    """What a command says, in one sentence, of an argument that it does not take."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_folder_without_a_run(tmp_path):
    start = "gpu_table.py: folder: expected what bench/gpu.sh left, with the step times, got "
    missing = tmp_path / "nosuch"
    assert refused(sys.executable, TOOL, missing) == f"{start}{missing}, which is no folder\n"
    text = refused(sys.executable, TOOL, tmp_path)
    assert text == f"{start}{tmp_path}, which has no times.json\n"
    times = tmp_path / "times.json"
    times.write_text("{")
    assert f"{start}{times}, which is no JSON" in refused(sys.executable, TOOL, tmp_path)
    times.write_text("[]")
    assert f"{times}, which has no cases" in refused(sys.executable, TOOL, tmp_path)
    assert list(tmp_path.iterdir()) == [times]


def test_a_folder_without_a_build(tmp_path):
    """What is missing is named with its folder, before anything runs or is written."""
    build, out = tmp_path / "build", tmp_path / "out"

    def run(*arguments):
        return refused(BENCH / "gpu.sh", "--build", build, "--out", out, *arguments)

    start = "gpu.sh: --build: expected "
    assert run() == f"{start}the folder of a build, got {build}, which is not there\n"
    build.mkdir()
    assert run("times") == f"{start}the program in {build}, got no deltic and no cli/deltic\n"
    text = run("--pack", tmp_path / "pack")
    assert text == f"{start}the program in {build}, got no cli/deltic\n"
    (build / "deltic").write_text("#!/bin/sh\n")
    text = run("tests")
    assert text == f"{start}the GPU's tests in {build}, got no gpu_test and no tests/gpu_test\n"
    assert f"{build}, got no python/deltic/libdeltic_torch.so and no bindings" in run("python")
    assert list(tmp_path.iterdir()) == [build]


@pytest.fixture
def fake(tmp_path):
    """Runs gpu.sh over a build whose programs print what they are told, and fail."""
    build, out = tmp_path / "build", tmp_path / "out"
    build.mkdir()
    out.mkdir()

    def run(program, text, *steps, code=1, **environment):
        script = f'#!/bin/sh\necho "$*" >>"$0.told"\ncat <<\'END\'\n{text}\nEND\nexit {code}\n'
        (build / program).parent.mkdir(exist_ok=True)
        (build / program).write_text(script)
        (build / program).chmod(0o755)
        command = [BENCH / "gpu.sh", "--build", build, "--out", out, *steps]
        keep = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **environment}
        done = subprocess.run(command, capture_output=True, text=True, env=keep)
        assert done.stderr == "", done.stderr
        return done.returncode, done.stdout.splitlines()

    return run, out


def test_failed_times_make_no_page(fake):
    """Nor do they leave that of an earlier run; the other steps' logs stay."""
    run, out = fake
    for name in ("times.json", "times.log", "h200.md", "h200.json", "verify.log"):
        (out / name).write_text("old")
    code, lines = run("deltic", "deltic: --device: expected a GPU, got none\n", "times")
    assert code == 1
    assert lines[1].split(None, 4)[:2] == ["times", "FAIL"]
    assert lines[1].endswith(" s, deltic: --device: expected a GPU, got none")
    assert lines[2:] == ["table skipped: times failed"]
    assert sorted(x.name for x in out.iterdir()) == ["run.json", "times.log", "verify.log"]


def test_verify_of_several_draws(fake):
    run, out = fake
    text = "FAIL cuda.move  move dense=3x1\n     state_pool: damaged\n3 passed, 1 failed, 2 skipped"
    code, lines = run("deltic", text, "verify", DELTIC_GPU_SEEDS="4 6-8")
    assert code == 1 and lines[:2] == text.splitlines()[:2]
    assert lines[-1].split(None, 2) == [
        "verify", "FAIL", "12 passed, 4 failed, 8 skipped, seeds 4 6 7 8"
    ]  # fmt: skip
    assert (out / "verify.log").read_text().splitlines()[-1] == lines[-1].split(None, 2)[2]
    told = (out.parent / "build" / "deltic.told").read_text().splitlines()
    files = ["verify.json", "verify.6.json", "verify.7.json", "verify.8.json"]
    assert told == [
        f"verify --device cuda --seed {seed} --json {out / name}"
        for seed, name in zip((4, 6, 7, 8), files, strict=True)
    ]
    code, lines = run("deltic", "3 passed, 0 failed, 2 skipped", "verify", code=0)
    assert code == 0 and lines[-1].endswith(" 3 passed, 0 failed, 2 skipped, seeds 1")
    # One that dies after others passed is no pass.
    code, lines = run("deltic", "deltic: out of memory", "verify", DELTIC_GPU_SEEDS="1 2")
    assert code == 1 and lines[-1].endswith("seed 1: deltic: out of memory")


def test_python_runs_every_file_with_cuda_tensors(fake):
    run, out = fake
    run("deltic", "", "verify")
    library = out.parent / "build" / "python" / "deltic" / "libdeltic_torch.so"
    library.parent.mkdir(parents=True)
    library.write_text("")
    python = str(out.parent / "build" / "python3")
    code, lines = run("python3", "5 passed in 1 s", "python", code=0, PYTHON=python)
    assert code == 0 and lines[-1].split(None, 2) == ["python", "ok", "5 passed in 1 s"]
    told = (out.parent / "build" / "python3.told").read_text()
    names = {Path(x).name for x in told.split() if x.startswith("tests/python/")}
    here = Path(__file__)
    wanted = {
        x.name
        for x in here.parent.glob("test_*.py")
        if "cuda.is_available" in x.read_text() or "needs_gpu" in x.read_text()
    }
    assert len(wanted) > 10 and wanted - {"test_soak.py", here.name} <= names  # soak is a step
    # Of files of which only these are run.
    assert "(not test_examples and not test_transformers) or on_a_gpu" in told
    for file in ("test_examples.py", "test_transformers.py"):
        text = (here.parent / file).read_text()
        for part in text.split('cuda.is_available(), reason="no GPU")')[1:]:
            assert "on_a_gpu(" in part.split("def test_", 1)[1].split("\n", 1)[0]


def test_groups_of_small_cases(fake):
    """Every operation that has cases has one for the sanitizers; groups and tools are chosen."""
    run, out = fake
    run("deltic", "", "verify")
    build = out.parent / "build"
    passed, path = "7 passed, 0 failed, 1 skipped", f"{build}/bin:/usr/bin:/bin"
    code, lines = run("bin/compute-sanitizer", passed, "sanitize", code=0, PATH=path)
    assert code == 0 and [x.split()[0] for x in lines[1:]] == ["memcheck", "racecheck", "initcheck"]
    folder = Path(__file__).resolve().parents[1] / "cases"
    words = [
        {x.split()[0] for x in text.splitlines() if x and x[0] != "#"}
        for text in ((out / "small.txt").read_text(), *(f.read_text() for f in folder.iterdir()))
    ]
    assert set.union(*words[1:]) == words[0]
    environment = {"PATH": path, "DELTIC_GPU_SANITIZE": "rows drafts initcheck"}
    code, lines = run("bin/compute-sanitizer", passed, "sanitize", code=0, **environment)
    assert len(lines) == 2 and lines[1].startswith("initcheck ") and "; rows drafts; " in lines[1]
    few = (out / "small.txt").read_text()
    assert [x for x in few.splitlines() if x[0] == "#"] == ["# rows", "# drafts"]
    assert "conv dense" in few and "commit" in few and "wy" not in few


def test_skipped_tests_are_counted(fake):
    run, _ = fake
    run("deltic", "", "verify")
    skip = "gpu_test.cpp:30: Skipped\nthere is no NVIDIA driver\n"
    log = f"{skip}{skip}[  PASSED  ] 1 test.\n[  SKIPPED ] 2 tests.\n"
    code, lines = run("gpu_test", log, "tests", code=0)
    assert code == 1 and len(lines) == 2, lines
    assert lines[1].split(None, 2) == [
        "tests", "FAIL", "2 tests skipped: there is no NVIDIA driver"
    ]  # fmt: skip


def test_progress_shows_its_scenarios(fake):
    run, _ = fake
    run("deltic", "", "verify")
    log = "fail  streams, two    0.1 s  KDA: 7 words differ\n1 passed, 1 failed, 0 skipped, 3 s"
    code, lines = run("gpu_progress", log, "progress")
    assert code == 1 and lines[0] == log.splitlines()[0]
    assert lines[-1].split(None, 2) == ["progress", "FAIL", "1 passed, 1 failed, 0 skipped, 3 s"]
    assert run("gpu_progress", "skipped: there is no GPU", "progress", code=77)[0] == 1


def test_a_missing_sanitizer_is_named(fake):
    run, _ = fake
    code, lines = run("deltic", "", "sanitize")
    assert code == 1 and "compute-sanitizer was not found" in lines[-1]


def test_what_gpu_sh_and_peers_refuse(tmp_path, monkeypatch):
    (tmp_path / "deltic").write_text("#!/bin/sh\n")
    file = tmp_path / "file"
    file.write_text("")
    command = (BENCH / "gpu.sh", "--build", tmp_path, "--out", file / "out", "times")
    start = "gpu.sh: --out: expected a folder that can be written, got "
    assert refused(*command) == f"{start}{file}/out\n"
    start = "gpu.sh: DELTIC_GPU_SEEDS: expected numbers and ranges as 1-5, got "
    for wrong in ("x", "5-1", "-1", "1.5"):
        monkeypatch.setenv("DELTIC_GPU_SEEDS", f"1 {wrong}")
        assert refused(*command[:-1], "verify") == f"{start}{wrong}\n"
    monkeypatch.setenv("DELTIC_GPU_SANITIZE", "core leakcheck")
    assert refused(*command[:-1], "sanitize").endswith(" or initcheck, got leakcheck\n")
    monkeypatch.setenv("DELTIC_GPU_SECONDS", "abc")
    text = "gpu.sh: DELTIC_GPU_SECONDS: expected a number of seconds, got abc\n"
    assert refused(*command) == text
    text = refused(BENCH / "peers" / "run.sh", "--nosuch")
    assert text == "run.sh: expected --quick, --threads N, --isa avx2 or --help, got --nosuch\n"
    for wrong, got in ((["--isa"], "none"), (["--isa", "sse4"], "sse4"), (["--isa=mmx"], "mmx")):
        text = refused(BENCH / "peers" / "run.sh", *wrong)
        assert text == f"run.sh: --isa: expected avx2, got {got}\n"
