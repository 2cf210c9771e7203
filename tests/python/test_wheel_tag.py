"""tools/wheel_tag.py: a wheel's name promises what its libraries need."""

import subprocess
import sys
import zipfile
from pathlib import Path

import deltic
import pytest
from support import ROOT

LIBRARY = Path(deltic.__file__).with_name("libdeltic_torch.so")
TOOL = ROOT / "tools" / "wheel_tag.py"
METADATA = "deltic-1.0.dist-info/METADATA"


def make(folder, platform, **more):
    """A wheel with the installed library, and other files by name."""
    path = folder / f"deltic-1.0-py3-none-{platform}.whl"
    paper = "deltic-1.0.dist-info/WHEEL"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(LIBRARY, "deltic/libdeltic_torch.so")
        for name, data in more.items():
            archive.writestr(f"deltic/{name}", data)
        archive.writestr(paper, f"Wheel-Version: 1.0\nTag: py3-none-{platform}\n")
        archive.writestr(METADATA, "Version: 1.0\n\n[a](b.md)\n")
        rows = [f"{name},sha256=old,1" for name in (paper, METADATA)]
        archive.writestr("deltic-1.0.dist-info/RECORD", "\n".join(rows) + "\n")
    return path


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)


def test_write_then_check(tmp_path):
    written = run("--write", make(tmp_path, "linux_x86_64"))
    assert written.returncode == 0, written.stderr
    wheel = Path(written.stdout.strip())
    assert wheel.name.startswith("deltic-1.0-py3-none-manylinux_2_") and run(wheel).returncode == 0
    assert list(tmp_path.iterdir()) == [wheel]
    with zipfile.ZipFile(wheel) as archive:
        said = archive.read("deltic-1.0.dist-info/WHEEL").decode()
        record = archive.read("deltic-1.0.dist-info/RECORD").decode()
        metadata = archive.read(METADATA).decode()
    assert said.splitlines()[1] == f"Tag: {wheel.stem.partition('-1.0-')[2]}"
    sizes = [line.rpartition(",")[2] for line in record.splitlines()]
    assert sizes == [str(len(said)), str(len(metadata))] and "old" not in record
    assert metadata == "Version: 1.0\n\na\n"  # a description for an index


@pytest.mark.parametrize("platform", ["manylinux_2_17_x86_64", "linux_x86_64"])
def test_a_promise_that_is_not_kept(tmp_path, platform):
    found = run(make(tmp_path, platform))
    assert found.returncode == 1 and f"or later, got {platform}" in found.stderr


def test_a_runtime_of_its_own_is_refused(tmp_path):
    found = run(make(tmp_path, "manylinux_2_41_x86_64", **{"libgomp-1a2b.so.1": b""}))
    assert found.returncode == 1 and "expected torch to bring it" in found.stderr
