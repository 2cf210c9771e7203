"""tools/fill_numerics.py: the tables of docs/numerics.md, from small made-up runs."""

import json
import subprocess
import sys

import pytest
from support import ROOT

TOOL = ROOT / "tools" / "fill_numerics.py"
PAGE = """# Numerics

| inputs | outputs and states | dq dk dv | dbeta | dg | dA_log, ddt_bias |
| --- | --- | --- | --- | --- | --- |
| bf16 or fp16, standard (random keys) | 0.6 % | 0.8 % | 1.5 % | 2 % | 1 % |
| fp32, and building blocks in fp32 | 1e-4 | 1e-4 | 1e-4 | 2e-4 | 2e-4 |

<!-- numerics:begin -->
old
<!-- numerics:end -->
between
<!-- numerics-gpu:begin -->
older
<!-- numerics-gpu:end -->
after
"""


def verified(case, error, budget, status="pass"):
    errors = {"error": {"o": error}, "budget": {"o": budget}} if status == "pass" else {}
    return {"case": case, "impl": "cpu.plain", "status": status, "error": {}, "budget": {}} | errors


def benched(suite, case, status="pass", **errors):
    return {"suite": suite, "case": case, "impl": "cuda.x", "status": status, "errors": errors}


VERIFY = {
    "schema": "deltic.verify/1",
    "machine": {"cpu": "A CPU"},
    "version": "0.1.0",
    "commit": "abc",
    "cases": [
        verified("scores_inverse gate=head dtype=f32", 1e-7, 2e-6),
        verified("scores_inverse gate=none dtype=f32", 3e-7, 2e-6),
        verified("scores_inverse gate=none dtype=f32", 0, 0, status="skip"),
        verified("backward gate=head dtype=bf16", 2e-3, 8e-3),
    ],
}
FORWARD = "forward gate=head dtype=bf16 gates=random keys=random"
BENCH = {
    "schema": "deltic.bench/1",
    "date": "2026-11-15",
    "machine": {"gpu.0": "NVIDIA H200, 143155 MiB, 132 SMs"},
    "version": "0.1.0",
    "commit": "def",
    "cases": [
        benched("wide", FORWARD, o=0.003, final_state=0.001),
        benched("wide", FORWARD.replace("random keys", "slow keys"), o=0.0045),
        benched("wide", FORWARD, status="fail", o=0.5),
        benched("hard", FORWARD.replace("keys=random", "keys=same"), o=0.07),
        benched("back", "backward dtype=bf16 keys=random", dg=0.002, dq=0.004),
        benched("blocks", "inverse dtype=bf16 keys=random", out=1e-7),
        benched("blocks", "scores_inverse dtype=f16 keys=random", out=6e-5, a=None),
        benched("decode", "decode dtype=bf16 keys=random", o=0.0015, state_pool=1e-7),
        {"suite": "wide", "case": FORWARD, "impl": "cuda.x", "status": "pass"},
    ],
}


def fill(folder, verify=VERIFY, bench=BENCH, page=PAGE):
    """The tool's process and the page it leaves."""
    paths = [folder / name for name in ("v.json", "gpu.json", "page.md")]
    for path, text in zip(paths, (json.dumps(verify), json.dumps(bench), page), strict=True):
        path.write_text(text)
    first = [] if verify is None else paths[:1]
    command = [sys.executable, TOOL, *first, "--gpu", paths[1], "--to", paths[2]]
    return subprocess.run(command, capture_output=True, text=True), paths[2].read_text()


def test_the_tables(tmp_path):
    done, page = fill(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = page.splitlines()
    assert not {"old", "older"} & set(lines) and "between" in lines and lines[-1] == "after"
    gpu = [line for line in lines if "`cuda.x`" in line]
    for line in (
        "| scores_inverse | f32 | `cpu.plain` | 2 | 2.0e-07 | 3.0e-07 | 15 % |",
        "| o | bf16 | 1 | 2.0e-03 | 2.0e-03 | 25 % |",
        "2026-11-15, NVIDIA H200, deltic 0.1.0 at def: the rows of",
    ):
        assert line in lines, line
    # The worst of each output; a wrong row has none, and inputs that are not standard no limit.
    assert gpu == [
        "| back | backward | bf16 | `cuda.x` | dg | 1 | 2.0e-03 | 2.0e-02 | 10 % |",
        "| back | backward | bf16 | `cuda.x` | dq | 1 | 4.0e-03 | 8.0e-03 | 50 % |",
        "| blocks | inverse | bf16 | `cuda.x` | out | 1 | 1.0e-07 | 1.0e-04 | 0 % |",
        "| blocks | scores_inverse | f16 | `cuda.x` | out | 1 | 6.0e-05 | 6.0e-03 | 1 % |",
        "| decode | decode | bf16 | `cuda.x` | o | 1 | 1.5e-03 | 6.0e-03 | 25 % |",
        "| decode | decode | bf16 | `cuda.x` | state_pool | 1 | 1.0e-07 | 1.0e-04 | 0 % |",
        "| hard | forward | bf16 | `cuda.x` | o | 1 | 7.0e-02 | - | - |",
        "| wide | forward | bf16 | `cuda.x` | final_state | 1 | 1.0e-03 | 6.0e-03 | 17 % |",
        "| wide | forward | bf16 | `cuda.x` | o | 2 | 4.5e-03 | 6.0e-03 | 75 % |",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(verify=BENCH), "run: expected the schema deltic.verify/1, got deltic.bench/1 in "),
        (dict(bench=[]), "--gpu: expected the schema deltic.bench/1, got None in "),
        (dict(page="no table"), "page: expected a row `bf16 or fp16, standard` in the error"),
    ],
)
def test_other_files_are_named(tmp_path, changes, text):
    done, page = fill(tmp_path, **changes)
    assert done.returncode == 2 and page == changes.get("page", PAGE)
    assert done.stderr.startswith(f"fill_numerics.py: {text}") and done.stderr.count("\n") == 1


def test_the_gpu_alone(tmp_path):
    done, page = fill(tmp_path, verify=None)
    assert done.returncode == 0, done.stderr
    lines = page.splitlines()
    assert "old" in lines and "older" not in lines and "`cpu.plain`" not in page
    assert sum("`cuda.x`" in line for line in lines) == 9


def test_the_page_is_that_of_the_run_beside_it():
    """After a new docs/benchmarks/h200.json `tools/fill_numerics.py` brings the page up to date."""
    run = json.loads((ROOT / "docs" / "benchmarks" / "h200.json").read_text())
    page = (ROOT / "docs" / "numerics.md").read_text()
    assert f"NVIDIA H200, deltic {run['version']} at {run['commit']}: the rows of" in page
    assert "| scores_inverse | bf16 | `cpu.plain` |" in page
