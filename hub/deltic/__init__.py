"""deltic as a kernel of Hugging Face's hub: the functions, and layers for kernelize()."""

from . import layers
from ._deltic import (
    causal_conv1d,
    causal_conv1d_update,
    commit,
    cumsum,
    decode,
    delta_rule,
    gate,
    inverse,
    kkt,
    l2norm,
    move_states,
    recurrent,
    rms_norm,
    scores,
    scores_inverse,
    step,
    wy,
)
from ._deltic.fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from ._deltic.fla.ops.kda import chunk_kda, fused_recurrent_kda

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "commit",
    "cumsum",
    "decode",
    "delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "gate",
    "inverse",
    "kkt",
    "l2norm",
    "layers",
    "move_states",
    "recurrent",
    "rms_norm",
    "scores",
    "scores_inverse",
    "step",
    "wy",
]
