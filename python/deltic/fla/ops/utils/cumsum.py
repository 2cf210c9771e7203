"""Cumulative sums inside of chunks, and over whole sequences."""

from typing import Any

import torch
from torch import Tensor

from ..._call import refuse_head_first, refuse_unknown, wide
from ..._surface import surface


def _check(
    function: str,
    g: Tensor,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    refuse_head_first(kwargs)
    refuse_unknown(function, kwargs)
    assert chunk_size is None or chunk_size > 0 and chunk_size & (chunk_size - 1) == 0, (
        f"chunk_size must be a power of 2, got {chunk_size}"
    )
    if cu_seqlens is not None:
        assert g.shape[0] == 1, f"with cu_seqlens the batch size must be 1, got {g.shape[0]}"


def _sums(
    g: Tensor,
    segment: int | None,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    """Sums inside of segments of so many tokens of each sequence, or of whole sequences.

    Any width, any sign. A token adds what 1, 2, 4, ... tokens before it have, as long as that is in
    its segment: no length is read on the host, nothing of another segment is ever added, and the
    rounding grows with the logarithm of the length. Rows past the offsets are 0.
    """
    B, T = g.shape[:2]
    if cu_seqlens is None:
        position, length = torch.arange(T, device=g.device).repeat(B), torch.tensor(T)
        inside = None
    else:
        position, length, inside = _places(cu_seqlens.long(), T)
    if segment is not None:
        start = position // segment * segment
        position, length = position - start, (length - start).clamp(max=segment)
    if reverse:
        position = length - 1 - position
    x = g.reshape(B * T, *g.shape[2:]).to(wide(g))
    x = x.flip(0) if reverse else x
    position = position.flip(0) if reverse else position
    step = 1
    while step < min(T, segment or T):
        reaches = (position >= step).view(-1, *[1] * (x.dim() - 1))
        before = torch.cat([torch.zeros_like(x[:step]), x[:-step]])
        x = torch.where(reaches, x + before, x)
        step *= 2
    x = x.flip(0) if reverse else x
    if inside is not None:
        x = torch.where(inside.view(-1, *[1] * (x.dim() - 1)), x, 0)
    x = (x if scale is None else x * scale).view(g.shape)
    return x.to(g.dtype if output_dtype is None else output_dtype)


def _places(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's place in its sequence, the sequence's length, and whether it is in one."""
    token = torch.arange(tokens, device=offsets.device)
    owner = torch.searchsorted(offsets, token, right=True) - 1
    inside = token < offsets[-1]
    owner = owner.clamp(0, max(len(offsets) - 2, 0))
    return token - offsets[owner], offsets[owner + 1] - offsets[owner], inside


def local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    """Sums inside of chunks, of any size."""
    return _sums(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


@surface(ahead=True, g="B,T,H")
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


@surface(ahead=True, g="B,T,H,D")
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


@surface(ahead=True, g="B,T,H|B,T,H,D")
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


@surface(ahead=True, s="B,T,H")
def chunk_global_cumsum_scalar(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    **kwargs: Any,
) -> Tensor:
    """:func:`chunk_global_cumsum` of ``s [B, T, H]``."""
    _check("chunk_global_cumsum_scalar", s, None, cu_seqlens, kwargs)
    return _sums(s, None, reverse, scale, cu_seqlens, output_dtype)


@surface(ahead=True, s="B,T,H,D")
def chunk_global_cumsum_vector(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    **kwargs: Any,
) -> Tensor:
    """:func:`chunk_global_cumsum` of ``s [B, T, H, D]``."""
    _check("chunk_global_cumsum_vector", s, None, cu_seqlens, kwargs)
    return _sums(s, None, reverse, scale, cu_seqlens, output_dtype)


@surface(ahead=True, s="B,T,H|B,T,H,D")
def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    **kwargs: Any,
) -> Tensor:
    """Cumulative sums along the tokens of each sequence, differentiable.

    Args:
        s: ``[B, T, H]`` or ``[B, T, H, D]``.
        reverse: sums from the sequence's end.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        scale: of the result.
        output_dtype: of the result; None: s's.

    Returns:
        A tensor of s's shape.
    """
    _check("chunk_global_cumsum", s, None, cu_seqlens, kwargs)
    if s.dim() not in (3, 4):
        raise ValueError(f"s must be [B, T, H] or [B, T, H, D], got {list(s.shape)}")
    return _sums(s, None, reverse, scale, cu_seqlens, output_dtype)
