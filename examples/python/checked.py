"""Types for argparse that say what they expect: a wrong value ends an example with status 2."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def integer(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number in a range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise ArgumentTypeError(f"expected an integer of at least {least}, got {text}")
        if value > most:
            raise ArgumentTypeError(f"expected an integer of at most {most}, got {text}")
        return value

    return read


positive = integer()
seed = integer(0, 2**63 - 1)


def _finite(text: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise ArgumentTypeError(f"expected a number {what}, got {text}")
    return value


def number(text: str) -> float:
    """A finite number that is not below 0."""
    return _finite(text, "of 0 or more", lambda x: x >= 0)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    return _finite(text, "above 0", lambda x: x > 0)


def words(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise ArgumentTypeError("expected a text, got an empty one")
    return text


def readable_file(text: str) -> Path:
    """A file that can be opened."""
    try:
        Path(text).open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentTypeError(f"expected a readable file, got {text} ({reason})") from None
    return Path(text)


def existing(text: str) -> Path:
    """A file or a folder that is there."""
    if not Path(text).exists():
        raise ArgumentTypeError(f"expected a file or a folder, got {text} (there is none)")
    return Path(text)


def folder(text: str) -> Path:
    """A folder that is there or can be made."""
    path = Path(text)
    for parent in (path, *path.parents):
        if parent.exists():
            if not parent.is_dir():
                raise ArgumentTypeError(f"expected a folder, got {text} ({parent} is a file)")
            break
    return path
