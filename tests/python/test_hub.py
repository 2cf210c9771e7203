"""tools/check_hub.py: a layout made from this installation, sound and spoilt."""

import inspect
import json
import shutil
import sys
from pathlib import Path

import deltic
import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_hub  # noqa: E402
import make_hub  # noqa: E402

UNIQUE = "0123456789"
PACKAGE = Path(deltic.__file__).parent


@pytest.fixture
def variant(tmp_path, monkeypatch):
    """A layout whose library has the installed one's code and a namespace of its own."""
    monkeypatch.setattr(make_hub, "PACKAGE", PACKAGE)
    library = tmp_path / "libdeltic_torch.so"
    shutil.copy(PACKAGE / "libdeltic_torch.so", library)
    found = make_hub.lay_out(tmp_path / "deltic", library, UNIQUE, None)
    with (found / "_deltic" / "libdeltic_torch.so").open("ab") as end:
        end.write(b"\0deltic_" + UNIQUE.encode() + b"\0")
    return found


def findings(variant):
    return check_hub.findings(variant.parents[1])


def test_the_layout_keeps_the_rules(variant):
    assert findings(variant) == []


def test_every_operation_is_exported():
    """What the package computes; what it says about itself, and newer names of aliases, are not."""
    found = (ROOT / "hub" / "deltic" / "__init__.py").read_text()
    aliases = {"chunk_cumsum", "log_decay"}
    for name in deltic.__all__:
        if inspect.isfunction(getattr(deltic, name)) and name not in aliases:
            if "impl" in inspect.signature(getattr(deltic, name)).parameters:
                assert f'"{name}"' in found, name


def append(name, text):
    def change(variant):
        with (variant / name).open("a") as end:
            end.write(text)

    return change


def metadata(**changes):
    def change(variant):
        path = variant / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def remove(name):
    return lambda variant: (variant / name).unlink()


MODULE = "\nclass X(torch.nn.Module):\n    "
FORWARD = "def forward(self):\n        return 1\n"
SPOILT = {
    "import numpy": (append("_deltic/_conv.py", "\nimport numpy\n"), "torch, got numpy"),
    "own name": (append("layers.py", "\nimport deltic\n"), "torch, got deltic"),
    "above": (append("layers.py", "\nfrom .. import x\n"), "got one above it"),
    "ops": (append("_deltic/_conv.py", "\ntorch.ops.deltic.conv\n"), "got torch.ops.deltic"),
    "name": (append("_deltic/_conv.py", "\nX = 'deltic::conv'\n"), "got deltic::conv"),
    "constructor": (append("layers.py", f"{MODULE}__init__ = None\n    {FORWARD}"), "['__init__']"),
    "no module": (append("layers.py", f"\nclass X:\n    {FORWARD}"), "expected a torch.nn.Module"),
    "no forward": (append("layers.py", f"{MODULE}pass\n"), "expected forward, got none"),
    "no list": (append("__init__.py", "\n__all__ = []\n"), "expected __all__, got none"),
    "not listed": (append("__init__.py", "\n__all__ = ['wy']\n"), "expected layers in __all__"),
    "no metadata": (remove("metadata.json"), "metadata.json: expected one, got none"),
    "no library": (remove("_deltic/libdeltic_torch.so"), "expected a library, got none"),
    "another build": (metadata(id="_deltic_cpu_abcdef0123"), "expected deltic_abcdef0123, got"),
    "no version": (metadata(version="1"), "version: expected int, got '1'"),
    "backend": (metadata(backend={"type": "cuda"}), "backend: expected cpu, got"),
    "variant": (lambda v: v.rename(v.with_name("torch29-cpu")), "expected a name like"),
    "config": (
        lambda v: (v.parents[1] / "build.toml").write_text("[general]\n"),
        "build.toml: name",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_rule_that_is_broken(variant, name):
    change, expected = SPOILT[name]
    change(variant)
    assert any(expected in line for line in findings(variant)), findings(variant)


def test_a_library_of_a_younger_system(variant, monkeypatch):
    monkeypatch.setattr(check_hub, "MOST_GLIBC", 17)
    assert any("expected symbols of glibc 2.17, got" in line for line in findings(variant))
