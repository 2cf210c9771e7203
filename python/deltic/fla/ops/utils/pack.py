"""Between padded batches ``[N, S, ...]`` and packed sequences ``[T, ...]``."""

import torch
from torch import Tensor

from ..._surface import surface
from .index import prepare_lens, prepare_token_indices


def _columns(cu_seqlens: Tensor, padding_side: str, longest: int) -> tuple[Tensor, Tensor]:
    """Each token's row and column in the padded batch."""
    sequence, place = prepare_token_indices(cu_seqlens).long().unbind(1)
    lens = prepare_lens(cu_seqlens).long()
    assert len(lens) == 0 or int(lens.max()) <= longest, (
        f"cu_seqlens must have sequences of at most {longest} tokens, got one of {int(lens.max())}"
    )
    return sequence, place if padding_side == "right" else place + longest - lens[sequence]


def _check(x: Tensor, padding_side: str) -> None:
    assert padding_side in ("left", "right"), (
        f"padding_side must be 'left' or 'right', got {padding_side!r}"
    )
    assert x.dim() >= 2, f"x must have at least 2 dimensions, got {x.dim()}"


@surface(ahead=True)
def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """The tokens of a padded batch, one sequence after another; differentiable.

    Args:
        x: ``[N, S, ...]``.
        cu_seqlens: ``[N + 1]``, the offsets that the sequences will have.
        padding_side: ``"left"`` or ``"right"``, where the padding is.

    Returns:
        ``[cu_seqlens[-1], ...]``.
    """
    _check(x, padding_side)
    assert len(cu_seqlens) == x.shape[0] + 1, (
        f"cu_seqlens must have {x.shape[0] + 1} entries, got {len(cu_seqlens)}"
    )
    return x[_columns(cu_seqlens, padding_side, x.shape[1])]


@surface(ahead=True)
def unpack_sequence(
    x: Tensor,
    cu_seqlens: Tensor,
    padding_side: str = "left",
    desired_shape: torch.Size | None = None,
) -> Tensor:
    """The way back: packed sequences as a batch padded with zeros; differentiable.

    Args:
        x: ``[T, ...]``.
        cu_seqlens: ``[N + 1]``, offsets of the sequences.
        padding_side: ``"left"`` or ``"right"``.
        desired_shape: of the result; by default ``[N, longest, ...]``.
    """
    _check(x, padding_side)
    sequences = len(cu_seqlens) - 1
    if desired_shape is None:
        longest = int(prepare_lens(cu_seqlens).max()) if sequences > 0 else 0
        desired_shape = torch.Size((sequences, longest, *x.shape[1:]))
    assert desired_shape[0] == sequences and tuple(desired_shape[2:]) == tuple(x.shape[1:]), (
        f"desired_shape must be [{sequences}, S] and then {list(x.shape[1:])}, "
        f"got {list(desired_shape)}"
    )
    places = _columns(cu_seqlens, padding_side, desired_shape[1])
    assert len(x) >= len(places[0]), (
        f"x must have the {len(places[0])} rows of cu_seqlens, got {len(x)}"
    )
    return x.new_zeros(desired_shape).index_put(places, x[: len(places[0])])
