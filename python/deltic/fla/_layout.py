"""Rows by chunks and back: ``[B, T, H, D]``, dense or packed, as ``[chunks, H, C, D]``."""

import torch
from torch import Tensor

from ._call import wide
from .ops.utils.index import prepare_chunk_indices, prepare_chunk_offsets, prepare_lens


class Layout:
    """Where the tokens of a batch lie in its chunks.

    Behind the last chunk there is an empty one. Its rows are 0, and so it leaves a state as it is.
    The lengths of packed sequences are read on the host, unless ``chunk_indices`` are given.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        chunk_size: int,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> None:
        B, T = self.batch, self.tokens = shape
        if cu_seqlens is None:
            count = -(-T // chunk_size)
            self.offsets = torch.arange(B + 1, device=device) * T
            sequence = torch.arange(B, device=device).repeat_interleave(count)
            number = torch.arange(count, device=device).repeat(B)
        else:
            if B != 1:
                raise ValueError(f"with `cu_seqlens` the batch size must be 1, got {B}")
            if chunk_indices is None:
                chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu)
            self.offsets = cu_seqlens.long()
            sequence, number = chunk_indices.long().unbind(1)
        self.chunks = len(sequence)
        self._set_rows(self.offsets, sequence, number, chunk_size)

    def _set_rows(self, offsets: Tensor, sequence: Tensor, number: Tensor, chunk: int) -> None:
        """The row of each chunk's tokens, and which of them are there."""
        used = sequence >= 0
        owner = sequence.clamp(min=0)
        begin = offsets[owner] + number * chunk
        size = torch.where(used, (offsets[owner + 1] - begin).clamp(0, chunk), 0)
        begin = torch.cat([begin, begin.new_zeros(1)])
        size = torch.cat([size, size.new_zeros(1)])
        place = torch.arange(chunk, device=begin.device)
        self.inside = place < size[:, None]  # [chunks + 1, C]
        # Rows that are not there are read from, and written to, one behind the last.
        self._rows = torch.where(self.inside, begin[:, None] + place, self.batch * self.tokens)
        self._last = (size - 1).clamp(min=0)
        self.is_last = self.inside & (place == size[:, None] - 1)

    def split(self, x: Tensor, heads: int | None = None) -> Tensor:
        """``[B, T, H, D]`` as ``[chunks + 1, H, C, D]`` in fp32, each head for its group."""
        flat = x.reshape(self.batch * self.tokens, *x.shape[2:]).to(wide(x))
        found = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self._rows].transpose(1, 2)
        if heads is None or heads == x.shape[2]:
            return found
        return found.repeat_interleave(heads // x.shape[2], 1)

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[chunks + 1, H, C, D]`` as ``[B, T, H, D]``; rows that no chunk has are 0."""
        x = x.transpose(1, 2)
        out = x.new_zeros(self.batch * self.tokens + 1, *x.shape[2:])
        out = out.index_put((self._rows,), x)
        return out[:-1].view(self.batch, self.tokens, *x.shape[2:]).to(dtype)

    def last(self, x: Tensor) -> Tensor:
        """The last row of every chunk of ``[chunks + 1, H, C, D]``: ``[chunks + 1, H, D]``."""
        at = self._last[:, None, None, None].expand(-1, x.shape[1], 1, x.shape[3])
        return x.gather(2, at).squeeze(2)

    def to_end(self, G: Tensor) -> Tensor:
        """``2^(G_last - G)``, and 0 in rows that are not there."""
        gap = self.last(G)[:, :, None] - G
        return torch.exp2(gap.masked_fill(~self.inside[:, None, :, None], -torch.inf))

    def states(self, x: Tensor, state_v_first: bool) -> Tensor:
        """States per chunk, ``[B, chunks, H, K, V]`` or ``[..., V, K]``, as ``[chunks, H, K, V]``.

        The empty chunk has one of zeros.
        """
        x = x.reshape(self.chunks, *x.shape[2:]).to(wide(x))
        x = x.mT if state_v_first else x
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])

    def to_states(self, x: Tensor, state_v_first: bool, dtype: torch.dtype) -> Tensor:
        """The way back of :meth:`states`."""
        x = (x.mT if state_v_first else x)[:-1].to(dtype)
        x = x.reshape(self.batch, self.chunks // max(self.batch, 1), *x.shape[1:])
        return x.contiguous()


class Passage(Layout):
    """The same, and in which order states pass through the chunks.

    ``steps`` has for each step the chunks that states go through. The longest sequences come first,
    as ``order`` says: the sequences of a step are the first ones of the step before. With
    ``chunk_indices`` and ``chunk_offsets``, as :func:`prepare_chunk_indices_static` makes them,
    every size here follows from shapes, and a CUDA graph can be replayed with other lengths: every
    sequence is in every step then, in the empty chunk where it has ended.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        chunk_size: int,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
    ) -> None:
        super().__init__(shape, device, chunk_size, cu_seqlens, cu_seqlens_cpu, chunk_indices)
        self.sequences = len(self.offsets) - 1
        longest = -(-self.tokens // chunk_size)
        if cu_seqlens is not None and chunk_offsets is not None:
            first = chunk_offsets[:-1].long()
            total = (prepare_lens(self.offsets) + chunk_size - 1) // chunk_size
            self.order = torch.arange(self.sequences, device=device)
            self.steps = [
                torch.where(step < total, first + step, self.chunks) for step in range(longest)
            ]
            return
        counts = [longest] * self.sequences
        if cu_seqlens is not None:
            lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
            counts = [-(-length // chunk_size) for length in lens.tolist()]
        order = sorted(range(self.sequences), key=lambda n: -counts[n])
        self.order = torch.tensor(order, device=device, dtype=torch.int64)
        first = prepare_chunk_offsets(self.offsets, chunk_size)[self.order]
        active = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
        self.steps = [first[:n] + step for step, n in enumerate(active)]
