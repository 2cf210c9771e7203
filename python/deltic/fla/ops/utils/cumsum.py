"""Cumulative sums inside of chunks."""

from typing import Any

import torch
from torch import Tensor

from ..._call import refuse_head_first, refuse_unknown, wide
from .index import prepare_chunk_offsets, prepare_token_indices


def _check(
    function: str, g: Tensor, chunk_size: int, cu_seqlens: Tensor | None, kwargs: dict[str, Any]
) -> None:
    refuse_head_first(kwargs)
    refuse_unknown(function, kwargs)
    assert chunk_size > 0 and chunk_size & (chunk_size - 1) == 0, (
        f"chunk_size must be a power of 2, got {chunk_size}"
    )
    if cu_seqlens is not None:
        assert g.shape[0] == 1, f"with cu_seqlens the batch size must be 1, got {g.shape[0]}"


def local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    """The sums themselves: any chunk size, any width, any sign. Rows past the offsets are 0."""
    B, T = g.shape[:2]
    offsets = torch.arange(B + 1, device=g.device) * T if cu_seqlens is None else cu_seqlens.long()
    token = prepare_token_indices(offsets)
    row = offsets[token[:, 0]] + token[:, 1]
    first = prepare_chunk_offsets(offsets, chunk_size)
    chunk, place = first[token[:, 0]] + token[:, 1] // chunk_size, token[:, 1] % chunk_size
    x = g.reshape(B * T, *g.shape[2:]).to(wide(g))
    padded = x.new_zeros((int(first[-1]), chunk_size, *g.shape[2:]))
    padded = padded.index_put((chunk, place), x[row])
    sums = padded.flip(1).cumsum(1).flip(1) if reverse else padded.cumsum(1)
    out = torch.zeros_like(x).index_put((row,), sums[chunk, place])
    out = (out if scale is None else out * scale).view(g.shape)
    return out.to(g.dtype if output_dtype is None else output_dtype)


def chunk_local_cumsum_scalar(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> Tensor:
    """:func:`chunk_local_cumsum` of ``g [B, T, H]``."""
    _check("chunk_local_cumsum_scalar", g, chunk_size, cu_seqlens, kwargs)
    return local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


def chunk_local_cumsum_vector(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> Tensor:
    """:func:`chunk_local_cumsum` of ``g [B, T, H, D]``."""
    _check("chunk_local_cumsum_vector", g, chunk_size, cu_seqlens, kwargs)
    return local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Cumulative sums along the tokens of each chunk, differentiable.

    Args:
        g: ``[B, T, H]`` or ``[B, T, H, D]``.
        chunk_size: a power of 2; chunks are counted from each sequence's start.
        reverse: sums from the chunk's end.
        scale: of the result.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        output_dtype: of the result; None: g's.
        chunk_indices, use_graph: not needed here, and not read.

    Returns:
        A tensor of g's shape.
    """
    _check("chunk_local_cumsum", g, chunk_size, cu_seqlens, kwargs)
    if g.dim() not in (3, 4):
        raise ValueError(f"g must be [B, T, H] or [B, T, H, D], got {list(g.shape)}")
    return local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)
