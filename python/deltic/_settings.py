"""What holds for the whole process: threads, the log of decisions, facts about the machine."""

import atexit
import ctypes
import logging
import os
import platform
from typing import Any, Literal, overload

from ._library import LIBRARY

_log = logging.getLogger("deltic.dispatch")
_copies = logging.getLogger("deltic.copies")
_said: set[tuple[str, str]] = set()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _on_line(line: bytes, tensors: bytes) -> None:
    """One decision, with the tensors of the call that it was made for; the first time only."""
    text, call = line.decode().removeprefix("deltic: "), tensors.decode()
    if (text, call) not in _said:
        _said.add((text, call))
        _log.info("%s%s", text, f" ({call})" if call else "")


def log_dispatch() -> None:
    """Sends decisions to the logger ``deltic.dispatch``, which prints them if no other does."""
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("deltic: %(message)s"))
        _log.addHandler(handler)
    LIBRARY.deltic_torch_set_log(_on_line)
    atexit.register(LIBRARY.deltic_torch_set_log, None)  # no line after the interpreter's end


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_copy(text: bytes) -> None:
    """A tensor that is copied because of its strides; the library says each argument once."""
    _copies.warning("%s", text.decode())


LIBRARY.deltic_torch_set_note(_on_copy)
atexit.register(LIBRARY.deltic_torch_set_note, None)

if os.environ.get("DELTIC_LOG") == "dispatch":
    log_dispatch()


def set_num_threads(n: int) -> None:
    """Sets how many threads a call on the CPU uses; 0: as many as torch does.

    The number changes no bit of a result. :func:`torch.set_num_threads` changes it for both.

    >>> import deltic
    >>> deltic.set_num_threads(2)
    >>> deltic.get_num_threads()
    2
    >>> deltic.set_num_threads(0)
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"set_num_threads: n: expected an int, got {n!r}")
    if not 0 <= n <= 4096 or LIBRARY.deltic_torch_set_num_threads(n) == 0:
        raise ValueError(f"set_num_threads: n: expected 0 (torch's number) to 4096, got {n}")


def get_num_threads() -> int:
    """How many threads a call on the CPU uses.

    >>> import deltic, torch
    >>> deltic.get_num_threads() == torch.get_num_threads()
    True
    """
    return int(LIBRARY.deltic_torch_get_num_threads())


def info() -> dict[str, str]:
    """Facts about build and machine: what to put into a report of a problem.

    >>> import deltic
    >>> facts = deltic.info()
    >>> facts["version"] == deltic.__version__, "cpu.used" in facts
    (True, True)
    """
    import torch

    facts: dict[str, str] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    def take(_: Any, key: bytes, value: bytes) -> None:
        facts[key.decode()] = value.decode()

    LIBRARY.deltic_torch_info(take)
    facts["threads"] = str(get_num_threads())
    facts["torch"] = torch.__version__
    return facts


def _implementations() -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """By operation the names of its implementations, best first, and why one cannot run here.

    And by name the operations of those that no call runs without naming them.
    """
    found: dict[str, dict[str, str]] = {}
    named: dict[str, list[str]] = {}

    @ctypes.CFUNCTYPE(
        *(None, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p),
        *(ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32),
    )
    def take(op: bytes, device: int, name: bytes, runs: int, sentence: bytes, only: int) -> None:
        found.setdefault(op.decode(), {})[name.decode()] = "" if runs else sentence.decode()
        if only:
            named.setdefault(name.decode(), []).append(op.decode())

    LIBRARY.deltic_torch_implementations(take)
    return found, named


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, dict[str, str]]: ...
def show_config(mode: str = "stdout") -> dict[str, dict[str, str]] | None:
    """Prints how the package was built and what of it this machine can run.

    Args:
        mode: ``"stdout"`` prints; ``"dicts"`` returns the same facts by section.

    >>> import deltic
    >>> found = deltic.show_config(mode="dicts")
    >>> list(found)
    ['build', 'machine', 'process', 'implementations', 'only when named', 'not usable here']
    >>> found["build"]["version"] == deltic.__version__
    True
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"show_config: mode: expected 'stdout' or 'dicts', got {mode!r}")
    facts = info()
    implementations, named = _implementations()
    missing = {
        name: why for by_name in implementations.values() for name, why in by_name.items() if why
    }
    compiled = list(dict.fromkeys(name for names in implementations.values() for name in names))
    # A step in parts has no code of its own.
    on_cpu = [x for x in compiled if x.startswith("cpu.") and x != "cpu.parts"]
    gpus = {key: value for key, value in facts.items() if key.startswith("gpu.")}
    sections = {
        "build": {
            **{key: facts[key] for key in ("version", "commit", "abi", "build", "compiler")},
            "CUDA": facts["cuda"],
            "CPU code": " ".join(on_cpu),
        },
        "machine": {
            "CPU": facts["cpu.found"],
            "CPU code used": " ".join(name for name in on_cpu if name not in missing),
            "driver": facts["driver"],
            **gpus,
        },
        "process": {
            "python": platform.python_version(),
            "torch": facts["torch"],
            "threads": facts["threads"],
            "checked": facts["checked"],
            "log": facts["log"],
        },
        "implementations": {name: " ".join(found) for name, found in implementations.items()},
        "only when named": {name: " ".join(operations) for name, operations in named.items()},
        "not usable here": missing,
    }
    if mode == "dicts":
        return sections
    print(f"deltic {facts['version']}")
    for title, section in sections.items():
        if not section:
            continue
        width = max(map(len, section))
        print(f"\n{title}")
        for key, value in section.items():
            print(f"  {key:<{width}}  {value}")
    return None
