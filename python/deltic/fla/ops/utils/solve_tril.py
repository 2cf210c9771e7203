"""The inverse of unit lower triangular blocks."""

import torch
from torch import Tensor

from ...._blocks import inverse
from ..._call import rows
from ..._surface import surface


@surface()
def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """``(I + A)^-1`` per chunk, differentiable; only entries below the diagonal are read.

    Args:
        A: ``[B, T, H, C]`` with the chunk length C, 16, 32 or 64: row i of each chunk.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        chunk_indices: not needed here, and not read.
        output_dtype: of the result; None: A's.

    Returns:
        A tensor of A's shape, zero above the diagonal.
    """
    assert A.shape[-1] in (16, 32, 64), f"A must have 16, 32 or 64 columns, got {A.shape[-1]}"
    dtype = A.dtype if output_dtype is None else output_dtype
    return inverse(rows(A), cu_seqlens=cu_seqlens, dtype=dtype)
