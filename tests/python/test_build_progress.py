"""tools/build_progress.py: somebody who waits for a build sees what it is at."""

import subprocess
import sys
from itertools import count
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from build_progress import progress  # noqa: E402


def test_tenths_and_parts():
    steps = [f"  [{i}/40] Building CUDA object\n" for i in range(1, 41)]
    said = list(
        progress(
            ["Processing .\n", "  -- GPU backend: CUDA 13.0, sm_90a\n", *steps], count().__next__
        )
    )
    assert said[0] == "GPU backend: CUDA 13.0, sm_90a, which takes some minutes"
    assert [line.split(",")[0] for line in said[1:]] == [
        f"compiled {i} of 40 files" for i in range(4, 41, 4)
    ]
    assert said[1] == "compiled 4 of 40 files, 1 s"
    assert list(progress(["-- GPU backend: none\n"])) == ["GPU backend: none"]
    make = progress([f"[{i:3}%] Building\n" for i in (5, 10, 14, 100)], lambda: 0.0)
    assert list(make) == ["compiled 10 %, 0 s", "compiled 100 %, 0 s"]
    assert list(progress(["nothing that counts\n", "[x/y]\n"])) == []


def test_the_log_has_everything(tmp_path):
    log = tmp_path / "wheel.log"
    text = "[1/2] one\nan error\n[2/2] two\n"
    command = [sys.executable, TOOLS / "build_progress.py"]
    ran = subprocess.run([*command, log], input=text, capture_output=True, text=True, check=True)
    assert log.read_text() == text
    assert [line.split(",")[0] for line in ran.stdout.splitlines()] == [
        "wheel: compiled 1 of 2 files",
        "wheel: compiled 2 of 2 files",
    ]
    assert subprocess.run(command, capture_output=True).returncode == 2
