"""Layers around the delta rule, with the parameter names of flash-linear-attention's."""

from ._norms import GatedRMSNorm, RMSNorm
from ._short_convolution import ShortConvolution
from .cache import Cache
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .kimi_delta_attention import KimiDeltaAttention

__all__ = [
    "Cache",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "RMSNorm",
    "ShortConvolution",
]
