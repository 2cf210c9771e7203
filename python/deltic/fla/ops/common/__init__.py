"""Building blocks that the operators share."""

from .chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
from .gate import fused_beta_sigmoid, fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd

__all__ = [
    "chunk_scaled_dot_kkt_fwd",
    "fused_beta_sigmoid",
    "fused_beta_sigmoid_bwd",
    "fused_beta_sigmoid_fwd",
]
