"""The switch of an inference server: on and off, and on by itself where it loads plugins."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ._late import Watch
from ._patch import Report, Switch, Target
from ._serving import find_module, numbers_of

# What is to be replaced in a module that is there; what is not goes into the dict, with the reason.
Targets = Callable[[Any, dict[str, str]], list[Target]]


@dataclass
class Plugin:
    """A server, the modules in which something is replaced, and what.

    Args:
        package, product: the server's names, to import and to read.
        oldest, parts: the first version that has these parts, and what they are called.
        logger: where the line about a plugin's work goes, which the server shows.
        modules: where the parts are, the most important one first.
        targets: what is replaced in a module.
        always: what is replaced besides, whatever the server imports.
    """

    package: str
    product: str
    oldest: str
    parts: str
    logger: str
    modules: tuple[str, ...]
    targets: Targets
    always: Callable[[dict[str, str]], list[Target]] = lambda left: []
    switch: Switch = field(default_factory=Switch)

    def __post_init__(self) -> None:
        self._log = logging.getLogger(self.logger)
        self._watch = Watch(self.modules, self._on_import)

    @property
    def _name(self) -> str:
        return f"deltic.integrations.{self.package}: {self.product}"

    def title(self) -> str:
        """The server with its version."""
        server = importlib.import_module(self.package)
        return f"{self.product} {getattr(server, '__version__', 'of no version')}"

    def _check(self) -> None:
        """Raises where the server is missing, or too old."""
        try:
            server = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                f"{self._name}: expected an installed package (pip install {self.package}), "
                f"got: {error}"
            ) from error
        version = str(getattr(server, "__version__", ""))
        numbers = numbers_of(version)
        # A checkout of no version says 0.0.0: its names are looked at instead.
        if (0, 1) <= numbers < numbers_of(self.oldest):
            raise ImportError(
                f"{self._name}: expected {self.oldest} or later, whose {self.parts} are in "
                f"{self.modules[0]}, got {version}"
            )

    def enable(self) -> Report:
        """Replaces everything that is there."""
        self._check()
        left: dict[str, str] = {}
        targets: list[Target] = []
        for name in self.modules:
            module, reason = find_module(name)
            if module is None:
                left[name] = reason
            else:
                targets += self.targets(module, left)
        if not targets:
            raise ImportError(
                f"{self._name}: expected one of the {self.parts} that are known here, got "
                + f"{self.title()}: "
                + "; ".join(f"{name}: {reason}" for name, reason in left.items())
            )
        targets += self.always(left)
        return self.switch.turn_on(self.title(), targets, left)

    def disable(self) -> Report:
        """Puts back everything."""
        self._watch.end()
        return self.switch.turn_off(self.product)

    def _say(self, report: Report, left: dict[str, str]) -> None:
        if report.done:
            self._log.info("%s", report.line())
        for title, reason in left.items():
            self._log.warning("%s: not replaced: %s: %s", report.title, title, reason)

    def _on_import(self, name: str) -> None:
        """Replaces what is in a module that has just been imported, and says so in one line."""
        left: dict[str, str] = {}
        try:
            targets = self.targets(importlib.import_module(name), left)
            self._say(self.switch.turn_on(self.title(), targets, left), left)
        except Exception as error:  # the server's own import must not fail for it
            self._log.warning("%s: nothing replaced in %s: %r", self._name, name, error)

    def register(self) -> None:
        """Replaces things as the server imports them; a line in the log where it cannot."""
        left: dict[str, str] = {}
        try:
            self._check()
        except ImportError as error:
            self._log.warning("%s", error)
            return
        self._say(self.switch.turn_on(self.title(), self.always(left), left), left)
        self._watch.begin()
