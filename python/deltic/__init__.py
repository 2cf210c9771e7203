"""deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, Kimi Delta Attention) for torch."""

from ._library import LIBRARY as _LIBRARY
from ._native import Checkpoints, decode, delta_rule, recurrent

__version__: str = _LIBRARY.deltic_torch_version().decode()

__all__ = ["Checkpoints", "decode", "delta_rule", "recurrent"]
