"""Where the tokens of a batch stand: dense, padded behind a mask, or packed with offsets."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._library import type_name


class Tail(NamedTuple):
    """The last ``history`` inputs of every sequence: from its tokens or from what came before."""

    is_token: Tensor  # [N, history]
    rows: Tensor  # [N, history], rows of the packed batch
    old: Tensor  # [N, history], columns of the state before


@dataclass(frozen=True, eq=False)
class Packing:
    """How rows ``[1, M, ...]`` come out of a batch ``[B, T, ...]``, and go back.

    ``cu_seqlens`` is None for a dense batch, whose rows are the batch itself. ``indices`` are the
    rows of the flattened batch that a mask leaves, None where nothing moves.
    """

    batch: int
    tokens: int
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    indices: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def pack(self, x: Tensor) -> Tensor:
        """The rows of a batch."""
        if self.indices is None:
            return x
        return x.flatten(0, 1).index_select(0, self.indices).unsqueeze(0)

    def unpack(self, rows: Tensor) -> Tensor:
        """The batch of rows, 0 where the mask had padding."""
        if self.indices is None:
            return rows
        batch = rows.new_zeros(self.batch * self.tokens, rows.shape[2])
        return batch.index_copy(0, self.indices, rows[0]).view(self.batch, self.tokens, -1)

    def positions(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sequence of each of the rows and its place in it; padding belongs to the last."""
        assert self.cu_seqlens is not None
        cu_seqlens = self.cu_seqlens.long()
        row = torch.arange(rows, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
        sequence = sequence.clamp(max=self.sequences - 1)
        return sequence, row - cu_seqlens[sequence]

    def tail(self, history: int, rows: int) -> Tail:
        """Where the last ``history`` inputs of every sequence are."""
        assert self.cu_seqlens is not None
        cu_seqlens = self.cu_seqlens.long()
        ends = cu_seqlens[1:, None] + torch.arange(-history, 0, device=cu_seqlens.device)
        before = ends - cu_seqlens[:-1, None]  # negative: so many inputs before the first token
        return Tail(
            before >= 0, ends.clamp(0, max(rows - 1, 0)), (before + history).clamp(0, history - 1)
        )


def plan(
    op: str,
    hidden_states: Tensor,
    hidden_size: int,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> Packing:
    """The packing of a call; explicit offsets win over a mask."""
    is_batch = isinstance(hidden_states, Tensor) and hidden_states.dim() == 3
    if not is_batch or hidden_states.shape[2] != hidden_size:
        raise ValueError(
            f"{op}: hidden_states: expected shape [batch, tokens, {hidden_size}], "
            f"got {_said(hidden_states)}"
        )
    batch, tokens = hidden_states.shape[:2]
    if attention_mask is not None:
        _check_mask(op, attention_mask, batch, tokens, cu_seqlens is None)
    if cu_seqlens is not None:
        _check_offsets(op, cu_seqlens, batch, tokens)
        return Packing(batch, tokens, cu_seqlens, cu_seqlens_cpu)
    if attention_mask is None:
        return Packing(batch, tokens)
    is_token = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
    compiling = torch.compiler.is_compiling()
    if not compiling and bool(is_token.all()):
        return Packing(batch, tokens)
    if not compiling:
        _refuse_holes(op, is_token)
    lengths = is_token.sum(dim=1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if compiling:
        # A graph has fixed shapes: padding goes behind the last offset, where o is 0.
        indices = is_token.flatten().logical_not().sort(stable=True).indices
    else:
        indices = is_token.flatten().nonzero().flatten()
    return Packing(batch, tokens, cu_seqlens, None, indices)


def _check_mask(op: str, mask: Tensor, batch: int, tokens: int, is_used: bool) -> None:
    expected = f"{op}: attention_mask: expected [batch, tokens] of 0 (padding) and 1, got "
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(expected + _said(mask))
    if not is_used:
        return
    if mask.shape[0] != batch or mask.shape[1] < tokens:
        raise ValueError(f"{expected}{_said(mask)} for {batch} x {tokens} tokens")
    is_visible = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_visible and mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(expected + "other values")


def _refuse_holes(op: str, is_token: Tensor) -> None:
    """Raises where padding lies between the tokens of a row: a mask of another meaning.

    On a GPU this waits for the mask, as the caller does for its rows; where every token counts,
    nobody comes here.
    """
    starts = is_token[:, 1:] & ~is_token[:, :-1]
    runs = starts.sum(dim=1) + is_token[:, :1].sum(dim=1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise ValueError(
            f"{op}: attention_mask: expected padding to the left or right of a row's tokens, got "
            f"some between them in row {row}"
        )


def _check_offsets(op: str, offsets: Tensor, batch: int, tokens: int) -> None:
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens: expected [sequences + 1] offsets, got {_said(offsets)}"
        )
    if batch != 1:
        raise ValueError(f"{op}: hidden_states: expected a batch of 1 with cu_seqlens, got {batch}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: cu_seqlens: expected int32 or int64, got {type_name(offsets.dtype)}"
        )
    if offsets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    # Before the operator does: the convolution indexes rows by them.
    if offsets[0] != 0 or offsets[-1] > tokens or bool((offsets.diff() < 0).any()):
        found = str(offsets.tolist()) if offsets.shape[0] <= 8 else "others"
        raise ValueError(
            f"{op}: cu_seqlens: expected offsets from 0 that never fall and end at {tokens} at the "
            f"latest, got {found}"
        )


def _said(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
