"""Work that waits until a module has been imported: plugins run before most of a server is."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Told(Loader):
    """A module's own loader, and then those who wait for it."""

    def __init__(self, loader: Any, then: Callable[[str], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: what asks it for source or resources finds them.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module.__name__)


class Watch(MetaPathFinder):
    """Calls a function with the name of each of some modules once it has been imported.

    Modules that are there already are told at once. Nothing is imported for it, and a module that
    nobody imports costs nothing.
    """

    def __init__(self, names: Sequence[str], then: Callable[[str], None]) -> None:
        self._names, self._then = set(names), then
        self._busy = threading.local()

    def begin(self) -> None:
        """Starts to watch."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            if name in sys.modules:
                self._tell(name)

    def end(self) -> None:
        """Watches no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _tell(self, name: str) -> None:
        if self in sys.meta_path:  # not switched off since
            self._then(name)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have, with a loader that tells when it is done."""
        if name not in self._names or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.name = None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Told(spec.loader, self._tell)
        return spec
