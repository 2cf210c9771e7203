"""deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, KDA) for torch."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._blocks import (
    chunk_cumsum,
    cumsum,
    gate,
    inverse,
    kkt,
    l2norm,
    log_decay,
    scores,
    scores_inverse,
    wy,
)
from ._conv import causal_conv1d, causal_conv1d_update
from ._library import LIBRARY as _LIBRARY
from ._native import Checkpoints, decode, delta_rule, recurrent
from ._norm import rms_norm
from ._settings import get_num_threads, info, set_num_threads, show_config
from ._states import commit, move_states
from ._step import step

if _TYPE_CHECKING:
    from ._explain import explain

__version__: str = _LIBRARY.deltic_torch_version().decode()

__all__ = [
    "Checkpoints",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_cumsum",
    "commit",
    "cumsum",
    "decode",
    "delta_rule",
    "explain",
    "gate",
    "get_num_threads",
    "info",
    "inverse",
    "kkt",
    "l2norm",
    "log_decay",
    "move_states",
    "recurrent",
    "rms_norm",
    "scores",
    "scores_inverse",
    "set_num_threads",
    "show_config",
    "step",
    "wy",
]
# Imported when somebody asks for them, and `explain` too: most programs need one of them, or none.
_SUBMODULES = ("fla", "integrations", "layers")


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _importlib.import_module(f".{name}", __name__)
    if name == "explain":
        globals()[name] = _importlib.import_module("._explain", __name__).explain
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name[:2] == "__")})
