"""Examples of docstrings, of README.md and of the pages in docs/ run as they stand."""

import doctest
import re
from pathlib import Path

import deltic
import deltic.layers
import pytest

HERE = Path(__file__).resolve().parent
ROOT = next(p for p in (HERE.parent, HERE.parent.parent) if (p / "docs").is_dir())
PUBLIC = [(deltic, name) for name in deltic.__all__ if name != "Checkpoints"]
PUBLIC += [(deltic.layers, name) for name in deltic.layers.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_docstring_examples(module, name):
    tests = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name)
    assert any(test.examples for test in tests), "no example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/fla.md", "docs/layers.md"])
def test_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= (1 if page == "README.md" else 3)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
