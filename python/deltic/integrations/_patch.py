"""Attributes of other packages replaced and put back, with a report of what was done."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

_log = logging.getLogger("deltic.integrations")
_MISSING = object()


@dataclass(frozen=True)
class Target:
    """One thing to be replaced: where it is, what takes its place, what to call it in a report."""

    owner: Any  # a module, a class, or a dict that is a registry
    name: str
    put: Any
    title: str
    note: str = ""
    # Packages in whose modules other names for the same object are replaced too.
    packages: tuple[str, ...] = ()


@dataclass
class Replaced:
    """One thing that was replaced, with what it needs to be put back."""

    target: Target
    old: Any = _MISSING


@dataclass
class Report:
    """What a call of ``enable()`` or ``disable()`` changed, and what it left as it was.

    ``str(report)`` lists both. As a context manager it takes the change back at the end.
    """

    title: str
    done: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    verb: str = "replaced"
    _back: Callable[[], Any] = field(default=lambda: None, repr=False)

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._back()

    def line(self) -> str:
        """What was done, without what it was done with, in one line."""
        names = [entry.partition(" -> ")[0] for entry in self.done]
        return f"{self.title}: {self.verb} " + (", ".join(names) or "nothing")

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.verb} {len(self.done)}"]
        lines += [f"  {entry}" for entry in self.done]
        if self.left:
            lines.append(f"not {self.verb}: {len(self.left)}")
            lines += [f"  {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _place(owner: Any) -> dict[str, Any]:
    """What holds an owner's attributes, to look at; a registry is its own."""
    place: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner)
    return place


def _write(owner: Any, name: str, value: Any) -> None:
    """Puts an attribute, or an entry of a registry, or takes it away."""
    if isinstance(owner, dict):
        if value is _MISSING:
            del owner[name]
        else:
            owner[name] = value
    elif value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _modules(packages: tuple[str, ...]) -> Iterator[ModuleType]:
    """The loaded modules of some packages."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in packages:
            yield module


def _swap_names(packages: tuple[str, ...], old: Any, put: Any) -> None:
    """Every global of these packages that is `old` becomes `put`, in modules loaded by now."""
    for module in _modules(packages):
        names = [name for name, value in list(vars(module).items()) if value is old]
        for name in names:
            setattr(module, name, put)


class Switch:
    """What one integration has replaced: on, off, and nothing twice.

    A lock orders calls of on and off. Calls of a replaced function that run meanwhile finish with
    what they started with.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._on: dict[tuple[int, str], Replaced] = {}

    def held(self, owner: Any, name: str) -> Any | None:
        """What was put into a place, if it is still there."""
        known = self._on.get((id(owner), name))
        if known is None or _place(owner).get(name) is not known.target.put:
            return None
        return known.target.put

    def _put(self, entry: Replaced) -> None:
        target = entry.target
        # A class may inherit the attribute: it is put back by taking ours away.
        entry.old = _place(target.owner).get(target.name, _MISSING)
        _write(target.owner, target.name, target.put)
        _swap_names(target.packages, entry.old, target.put)
        self._on[(id(target.owner), target.name)] = entry

    def _restore(self, entry: Replaced) -> str | None:
        """Puts one thing back; a sentence where that would take away someone else's."""
        target = entry.target
        self._on.pop((id(target.owner), target.name), None)
        _swap_names(target.packages, target.put, entry.old)
        current = _place(target.owner).get(target.name, _MISSING)
        if current is not target.put and current is not entry.old:
            return "something else was put there since"
        if current is not entry.old or current is not _MISSING:
            _write(target.owner, target.name, entry.old)
        return None

    def turn_on(self, title: str, targets: list[Target], left: dict[str, str]) -> Report:
        """Replaces the targets that are not replaced yet. The report's exit undoes just these."""
        with self._lock:
            report = Report(title, left=dict(left))
            made = []
            for target in targets:
                if self.held(target.owner, target.name) is not None:
                    report.left[target.title] = "replaced before"
                    continue
                made.append(Replaced(target))
                self._put(made[-1])
                report.done.append(target.title + (f" -> {target.note}" if target.note else ""))

            def back() -> None:
                with self._lock:
                    for entry in reversed(made):
                        if self._on.get((id(entry.target.owner), entry.target.name)) is entry:
                            self._restore(entry)

            report._back = back
            return report

    def turn_off(self, title: str) -> Report:
        """Puts back everything. The report's exit replaces it again."""
        with self._lock:
            report = Report(title, verb="put back")
            entries = list(self._on.values())
            for entry in reversed(entries):
                reason = self._restore(entry)
                if reason is None:
                    report.done.append(entry.target.title)
                else:
                    report.left[entry.target.title] = reason

            def back() -> None:
                with self._lock:
                    for entry in entries:
                        if self.held(entry.target.owner, entry.target.name) is None:
                            self._put(entry)

            report._back = back
            return report


_said: set[str] = set()


def say_once(function: str, reason: str) -> None:
    """Logs that calls of a function go to the original, once for each reason."""
    warn_once(f"{function}: handed to the original: {reason}")


def warn_once(text: str) -> None:
    """Logs a warning, once in a process."""
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def named(put: Callable[..., Any], original: Any, name: str) -> Callable[..., Any]:
    """A replacement that looks like the original to help() and to inspect.unwrap()."""
    put.__name__ = put.__qualname__ = name
    put.__doc__ = getattr(original, "__doc__", None)
    put.__dict__["__wrapped__"] = original
    return put
