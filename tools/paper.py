"""Replaces generated blocks of the papers."""

from pathlib import Path


def replace_block(path: Path, name: str, text: str) -> None:
    """Puts `text` between <!-- name:begin --> and <!-- name:end --> of the file."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    old = path.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        raise SystemExit(f"{path.name}: expected one block `{name}`")
    head, rest = old.split(begin)
    tail = rest.split(end)[1]
    path.write_text(head + begin + text.rstrip("\n") + "\n" + end + tail, encoding="utf-8")
