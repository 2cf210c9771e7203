"""Reads tables of the papers and replaces their generated blocks."""

from pathlib import Path


def _parts(path: Path, name: str) -> tuple[str, str, str]:
    """The file before, in and after a block, marks with what is outside of it."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    old = path.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        raise SystemExit(f"{path.name}: expected one block `{name}`")
    head, rest = old.split(begin)
    text, tail = rest.split(end)
    return head + begin, text, end + tail


def block_of(path: Path, name: str) -> str:
    """What lies between <!-- name:begin --> and <!-- name:end --> of the file."""
    return _parts(path, name)[1]


def replace_block(path: Path, name: str, text: str) -> None:
    """Puts `text` between <!-- name:begin --> and <!-- name:end --> of the file."""
    head, _, tail = _parts(path, name)
    path.write_text(head + text.rstrip("\n") + "\n" + tail, encoding="utf-8")


def table_rows(text: str) -> dict[str, list[str]]:
    """The cells of every table's rows by the first one."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            first, *rest = [cell.strip() for cell in line.strip().strip("|").split("|")]
            rows[first] = rest
    return rows
