#!/usr/bin/env python3
"""The README as a package index shows it: no link on that page may lead nowhere.

  tools/index_page.py [--source URL --version X] README

Prints it. An index has the text alone, without the files that it links to. Where the project has a
public address (`Source` in `[project.urls]` of pyproject.toml) links and plots get one there, at
the tag of the version; where it has none, a link becomes its text and a plot is left out.
`tools/wheel_tag.py --write` puts the result into a wheel, `tools/check_wheel.py` looks for what is
left.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

# Code, which is left as it is: fenced, or between backticks.
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]+)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
SOURCES = re.compile(r'(?P<before>\b(?:src|srcset)=")(?P<target>[^"]+)')
ABSOLUTE = re.compile(r"https?://|mailto:")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with its prose changed."""
    # Code keeps its place in the prose, since the text of a link may be code.
    kept = CODE.findall(text)
    parts = iter(kept)
    changed = change(CODE.sub("\0", text))
    if changed.count("\0") != len(kept):
        raise ValueError("index_page: text: expected all code to stay, got some left out")
    return re.sub("\0", lambda _: next(parts), changed)


def relative(text: str) -> list[str]:
    """Targets of links and pictures that an index page would not find."""
    found: list[str] = []

    def look(prose: str) -> str:
        found.extend(m["target"] for m in LINK.finditer(prose) if not ABSOLUTE.match(m["target"]))
        found.extend(
            m["target"] for m in SOURCES.finditer(prose) if not ABSOLUTE.match(m["target"])
        )
        return prose

    outside_code(text, look)
    return found


def index_page(text: str, source: str | None = None, version: str = "") -> str:
    """The text with absolute links, or without the links that have no address."""

    def link(m: re.Match[str]) -> str:
        if ABSOLUTE.match(m["target"]):
            return m[0]
        if source is None:
            return m["text"]
        place = m["target"] if m["target"].startswith("#") else f"/blob/v{version}/{m['target']}"
        return f"[{m['text']}]({source}{place})"

    def picture(m: re.Match[str]) -> str:
        if source is None:
            return ""
        return SOURCES.sub(rf"\g<before>{source}/raw/v{version}/\g<target>", m[0])

    return outside_code(text, lambda prose: LINK.sub(link, PICTURE.sub(picture, prose)))


def with_index_page(metadata: bytes) -> bytes:
    """A wheel's METADATA with its description, the part behind the first empty line, changed."""
    head, blank, text = metadata.decode().partition("\n\n")
    source = re.search(r"^Project-URL: Source, (\S+?)/?$", head, re.MULTILINE)
    version = re.search(r"^Version: (\S+)$", head, re.MULTILINE)
    changed = index_page(text, source[1] if source else None, version[1] if version else "")
    return (head + blank + changed).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", help="the project's public address")
    parser.add_argument("--version", default="", help="of the tag that links go to")
    parser.add_argument("readme", type=Path)
    arguments = parser.parse_args()
    text = arguments.readme.read_text(encoding="utf-8")
    print(index_page(text, arguments.source, arguments.version), end="")


if __name__ == "__main__":
    main()
