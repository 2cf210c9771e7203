"""tools/check_wheel.py: the wheel of this installation passes, spoilt ones do not."""

import sys
import zipfile
from pathlib import Path

import deltic
import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_wheel  # noqa: E402

PACKAGE = Path(deltic.__file__).parent


def make(folder, platform="manylinux_2_28_x86_64", without=(), **more):
    """A wheel of the installed package, without some files and with others."""
    path = folder / f"deltic-1.0-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in (*PACKAGE.rglob("*.py"), PACKAGE / "py.typed", *PACKAGE.glob("*.so")):
            name = f"deltic/{source.relative_to(PACKAGE)}"
            if name not in without:
                archive.write(source, name)
        archive.writestr("deltic-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        for name, data in more.items():
            archive.writestr(name, data)
    return path


def test_the_package_passes(tmp_path):
    assert check_wheel.findings(make(tmp_path)) == []


def test_a_tag_older_than_the_symbols(tmp_path):
    found = check_wheel.findings(make(tmp_path, "manylinux_2_17_x86_64"))
    assert found == ["expected a tag of at least manylinux_2_28"]


def test_symbols_newer_than_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(check_wheel, "MOST_GLIBC", 24)
    found = check_wheel.findings(make(tmp_path))
    assert any("expected symbols of glibc 2.24, got" in x for x in found)


def test_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(check_wheel, "MOST_MB", {"cpu": 0.1, "cuda": 0.1})
    assert any("expected at most 0.1 MB, got" in x for x in check_wheel.findings(make(tmp_path)))


def test_a_name_that_is_exported_by_mistake(tmp_path, monkeypatch):
    names = check_wheel.exported(str(PACKAGE / "libdeltic_torch.so"))
    assert "deltic_torch_version" in names
    monkeypatch.setattr(check_wheel, "exported", lambda library: {*names, "_ZN6deltic3runEv"})
    found = check_wheel.findings(make(tmp_path))
    assert found == ["expected exported names deltic_torch_*, got _ZN6deltic3runEv"]


def test_a_link_that_an_index_cannot_follow(tmp_path):
    paper = "deltic-1.0.dist-info/METADATA"
    said = "Name: deltic\n\n[absolute](https://example.org) and [relative](docs/x.md)\n"
    found = check_wheel.findings(make(tmp_path, **{paper: said}))
    assert found == ["expected links that an index can follow in its description, got docs/x.md"]


@pytest.mark.parametrize("name", ["deltic/notes.txt", "tests/test_native.py", "deltic/old.so"])
def test_a_file_that_does_not_belong(tmp_path, name):
    data = (PACKAGE / "libdeltic_torch.so").read_bytes() if name.endswith(".so") else b""
    found = check_wheel.findings(make(tmp_path, **{name: data}))
    assert f"expected the package and its metadata alone, got {name}" in found


@pytest.mark.parametrize("name", ["deltic/py.typed", "deltic/libdeltic_torch.so"])
def test_a_file_that_is_missing(tmp_path, name):
    assert f"expected {name}, got none" in check_wheel.findings(make(tmp_path, without=(name,)))
