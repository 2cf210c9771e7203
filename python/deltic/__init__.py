"""deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, KDA) for torch."""

from ._blocks import cumsum, gate, inverse, kkt, l2norm, scores, scores_inverse, wy
from ._conv import causal_conv1d, causal_conv1d_update
from ._library import LIBRARY as _LIBRARY
from ._native import Checkpoints, decode, delta_rule, recurrent

__version__: str = _LIBRARY.deltic_torch_version().decode()

__all__ = [
    "Checkpoints",
    "causal_conv1d",
    "causal_conv1d_update",
    "cumsum",
    "decode",
    "delta_rule",
    "gate",
    "inverse",
    "kkt",
    "l2norm",
    "recurrent",
    "scores",
    "scores_inverse",
    "wy",
]
