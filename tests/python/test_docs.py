"""Examples of docstrings and of the pages in docs/ run as they stand."""

import doctest
import re
from pathlib import Path

import deltic
import pytest

HERE = Path(__file__).resolve().parent
PAGES = [p for p in (HERE.parent / "docs", HERE.parent.parent / "docs") if p.is_dir()]
PUBLIC = [name for name in deltic.__all__ if name != "Checkpoints"]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples(name):
    tests = doctest.DocTestFinder(recurse=False).find(getattr(deltic, name), name)
    assert any(test.examples for test in tests), "no example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("page", ["python.md", "fla.md"])
def test_page(page):
    text = (PAGES[0] / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)
