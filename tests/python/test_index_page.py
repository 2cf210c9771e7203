"""tools/index_page.py: what a package index shows has no link that leads nowhere."""

import re
import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import index_page  # noqa: E402

README = (ROOT / "README.md").read_text()
SOURCE = "https://example.org/deltic"
SMALL = """# Title

See [docs/python.md](docs/python.md), [`code`](#measured) and [elsewhere](https://example.org/x).

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="plots/dark.svg">
  <img alt="a plot" src="plots/light.svg">
</picture>

```python
x = table[0](docs)  # [text](target) in code stays
```
"""


def test_without_an_address_links_become_text():
    found = index_page.index_page(SMALL)
    assert "See docs/python.md, `code` and [elsewhere](https://example.org/x)." in found
    assert "<picture>" not in found and "[text](target) in code stays" in found
    assert index_page.relative(found) == []


def test_with_an_address_links_become_absolute():
    found = index_page.index_page(SMALL, SOURCE, "1.2")
    assert f"[docs/python.md]({SOURCE}/blob/v1.2/docs/python.md)" in found
    assert f"[`code`]({SOURCE}#measured)" in found
    assert f'srcset="{SOURCE}/raw/v1.2/plots/dark.svg"' in found
    assert f'src="{SOURCE}/raw/v1.2/plots/light.svg"' in found
    assert index_page.relative(found) == []


@pytest.mark.parametrize("source", [None, SOURCE])
def test_the_readme(source):
    """Every relative link and plot of ours is seen, and none is left; code is as it was."""
    before = index_page.relative(README)
    assert {"docs/python.md", "#measured", "docs/plots/cpu_light.svg"} <= set(before)
    assert len(before) > 15
    found = index_page.index_page(README, source, "0.2.0")
    assert index_page.relative(found) == []
    assert index_page.CODE.findall(found) == index_page.CODE.findall(README)
    if source is None:
        assert "](" not in index_page.CODE.sub("", found) and "<picture>" not in found
    else:
        paths = re.findall(rf"{re.escape(SOURCE)}/(?:blob|raw)/v0.2.0/([\w./-]+)", found)
        assert len(paths) > 15 and not [p for p in paths if not (ROOT / p).exists()]


@pytest.mark.parametrize("line", ["", f"Project-URL: Source, {SOURCE}/\n"])
def test_metadata_of_a_wheel(line):
    head = f"Metadata-Version: 2.4\nName: deltic\nVersion: 0.2.0\n{line}"
    found = index_page.with_index_page(f"{head}\n{SMALL}".encode()).decode()
    source = SOURCE if line else None
    assert found == f"{head}\n{index_page.index_page(SMALL, source, '0.2.0')}"
