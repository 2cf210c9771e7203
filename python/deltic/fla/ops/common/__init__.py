"""Building blocks that the operators share."""

from .chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from .chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv, chunk_bwd_dv_local, chunk_fwd_o
from .chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
from .gate import fused_beta_sigmoid, fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd

__all__ = [
    "chunk_bwd_dqkwg",
    "chunk_bwd_dv",
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_scaled_dot_kkt_fwd",
    "fused_beta_sigmoid",
    "fused_beta_sigmoid_bwd",
    "fused_beta_sigmoid_fwd",
]
