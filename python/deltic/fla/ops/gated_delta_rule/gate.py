"""The gate of Gated DeltaNet: ``-exp(A_log) * softplus(g + dt_bias)``, one per value head.

``g [..., HV]``; ``A_log`` and ``dt_bias`` have HV numbers.
"""

import torch
from torch import Tensor

from ... import _gates
from ..._call import rows
from ..._surface import surface
from ..utils.cumsum import chunk_local_cumsum


@surface(ahead=True)
def naive_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate in plain torch."""
    return _gates.naive(g, A_log, dt_bias, None, output_dtype, 1)


@surface()
def gdn_gate_fwd(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate without a graph."""
    with torch.no_grad():
        return _gates.forward(g, A_log, dt_bias, None, output_dtype, 1)


@surface(ahead=True)
def gdn_gate_bwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of g, A_log and dt_bias for the gradient ``dyg`` of the gate."""
    dg, dA, dbias = _gates.backward(g, A_log, dt_bias, dyg, None, 1)
    assert dg is not None and dA is not None
    return dg, dA, dbias


@surface()
def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate, differentiable."""
    return _gates.forward(g, A_log, dt_bias, None, output_dtype, 1)


@surface(g="B,T,HV")
def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """The gate's cumulative sum inside of chunks, times ``scale``; ``g [B, T, HV]``."""
    decay = _gates.forward(rows(g), A_log, dt_bias, None, torch.float32, 1)
    dtype = g.dtype if output_dtype is None else output_dtype
    return chunk_local_cumsum(
        decay, chunk_size, scale=scale, cu_seqlens=cu_seqlens, output_dtype=dtype
    )
