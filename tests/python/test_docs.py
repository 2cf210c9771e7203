"""Examples of docstrings, of README.md and of the pages in docs/ run as they stand."""

import doctest
import re

import deltic
import deltic.integrations.transformers
import deltic.layers
import pytest
from support import ROOT

PUBLIC = [(deltic, name) for name in deltic.__all__ if name != "Checkpoints"]
PUBLIC += [(deltic.layers, name) for name in deltic.layers.__all__]
PUBLIC += [(deltic.integrations.transformers, name) for name in ("to_deltic", "from_deltic")]

# Every page with Python in it.
PAGES = ["README.md"] + [
    f"docs/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if "```python\n" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_docstring_examples(module, name):
    tests = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name)
    assert any(test.examples for test in tests), "no example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    if page in ("README.md", "docs/transformers.md"):
        pytest.importorskip("transformers", minversion="5.16")
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= (1 if page == "README.md" else 3)
    names: dict = {}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        deltic.integrations.transformers.disable()


def test_citation():
    """What the format requires, and no version that somebody would forget to change."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    keys = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
    assert keys["cff-version"] == "1.2.0" and keys["type"] == "software"
    assert {"message", "title", "authors", "license"} <= keys.keys() and "version" not in keys
    assert keys["license"] == "Apache-2.0" and keys["title"].strip('"').startswith("deltic: ")
    assert any(line.startswith("  - name: ") for line in lines)
