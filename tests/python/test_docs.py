"""Examples of docstrings, of README.md and of the pages in docs/ run as they stand."""

import doctest
import re
from pathlib import Path

import deltic
import pytest

HERE = Path(__file__).resolve().parent
ROOT = next(p for p in (HERE.parent, HERE.parent.parent) if (p / "docs").is_dir())
PUBLIC = [name for name in deltic.__all__ if name != "Checkpoints"]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples(name):
    tests = doctest.DocTestFinder(recurse=False).find(getattr(deltic, name), name)
    assert any(test.examples for test in tests), "no example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(
    "page", ["README.md", "docs/python.md", "docs/fla.md", "docs/transformers.md"]
)
def test_page(page):
    if page == "docs/transformers.md":
        pytest.importorskip("transformers", minversion="5.16")
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= (1 if page == "README.md" else 3)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
