"""The gates of Kimi Delta Attention, one per value head and channel.

``-exp(A_log) * softplus(g + dt_bias)`` or, with a lower bound,
``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, where the factor is 1 without A_log.
``g [..., HV, K]``; ``A_log`` has HV numbers, ``dt_bias`` HV * K.
"""

from typing import Any

import torch
from torch import Tensor

from ... import _gates
from ..._call import refuse_head_first, refuse_unknown
from ..._surface import surface
from ..utils.cumsum import chunk_local_cumsum


@surface(ahead=True)
def naive_kda_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The softplus form in plain torch."""
    return _gates.naive(g, A_log, dt_bias, None, output_dtype, 2)


@surface(ahead=True)
def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The bounded form in plain torch."""
    return _gates.naive(g, A_log, dt_bias, lower_bound, output_dtype, 2)


@surface()
def kda_gate_fwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate without a graph."""
    with torch.no_grad():
        return _gates.forward(g, A_log, dt_bias, lower_bound, output_dtype, 2)


@surface(ahead=True)
def kda_gate_bwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of g, A_log and dt_bias for the gradient ``dyg`` of the gate."""
    if dyg is None:
        raise ValueError("`dyg`, the gradient of the gate, is needed, got None")
    dg, dA, dbias = _gates.backward(g, A_log, dt_bias, dyg, lower_bound, 2)
    assert dg is not None
    return dg, dA, dbias


@surface()
def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate, differentiable."""
    return _gates.forward(g, A_log, dt_bias, lower_bound, output_dtype, 2)


@surface(g="B,T,HV,K")
def kda_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    lower_bound: float | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The gate's cumulative sum inside of chunks, times ``scale``; ``g [B, T, HV, K]``."""
    refuse_head_first(kwargs)
    refuse_unknown("kda_gate_chunk_cumsum", kwargs)
    assert g.dim() == 4, f"g must be [B, T, HV, K], got {list(g.shape)}"
    decay = _gates.forward(g, A_log, dt_bias, lower_bound, torch.float32, 2)
    dtype = g.dtype if output_dtype is None else output_dtype
    return chunk_local_cumsum(
        decay, chunk_size, scale=scale, cu_seqlens=cu_seqlens, output_dtype=dtype
    )
