"""The names of flash-linear-attention for the delta-rule family, on deltic's operators.

The module layout mirrors fla's: ``from fla.ops.kda import chunk_kda`` becomes
``from deltic.fla.ops.kda import chunk_kda``.
"""

from . import ops

__all__ = ["ops"]
