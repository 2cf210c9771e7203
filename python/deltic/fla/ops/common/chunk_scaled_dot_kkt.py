"""``beta * k k^T`` inside of chunks."""

import torch
from torch import Tensor

from ...._blocks import kkt
from ..._call import rows
from ..._chunks import natural
from ..._surface import surface


@surface(ahead=True, g="B,T,HV|B,T,HV,K")
def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """``beta_i * k_i . k_j * 2^(G_i - G_j)`` for j < i inside of chunks, else 0; differentiable.

    Args:
        k: ``[B, T, H, K]``.
        g: the cumulative sum G in base 2, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        chunk_size: 16, 32 or 64.
        output_dtype: of the result.
        chunk_indices: not needed here, and not read.

    Returns:
        ``[B, T, HV, chunk_size]``.
    """
    return kkt(
        rows(k),
        g=natural(g),
        beta=rows(beta),
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        dtype=output_dtype,
    )
