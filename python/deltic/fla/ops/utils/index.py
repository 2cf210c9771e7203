"""Where sequences and chunks lie in a packed batch.

Results have the dtype (int64 where it says so) and the device of ``cu_seqlens``.
``cu_seqlens_cpu``, a copy on the host, saves the wait for a device.
"""

import torch
from torch import Tensor

from ..._surface import surface

_CPU = torch.device("cpu")


@surface(ahead=True)
def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """``[N]``: the lengths."""
    return cu_seqlens.diff()


@surface(ahead=True, mask="N,T")
def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """``[N]`` int32: how many tokens of each row a mask ``[N, T]`` keeps."""
    return mask.sum(dim=-1, dtype=torch.int32)


@surface(ahead=True, lens="N")
def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """``[N + 1]``: the offsets of sequences of these lengths."""
    ends = lens.cumsum(0, dtype=dtype)
    return torch.cat([ends.new_zeros(1), ends])


@surface(ahead=True, mask="N,T")
def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """``[N + 1]``: the offsets of the sequences that a mask keeps."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of sum(counts) things: whose it is, and which of them."""
    counts = counts.to(torch.int64)
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - first[owner]


def _seen(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu


def _chunks(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (prepare_lens(cu_seqlens) + chunk_size - 1) // chunk_size


@surface(ahead=True)
def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = torch.int32,
    device: torch.device | None = _CPU,
) -> Tensor:
    """The offsets of sequences cut into pieces of at most ``split_size`` tokens each.

    The sequences are those of ``cu_seqlens``, else ``batch_size`` of ``seq_len`` tokens each. An
    empty one has no piece.
    """
    if split_size is None:
        raise TypeError("prepare_split_cu_seqlens: `split_size` is needed, got None")
    if split_size < 1:
        raise ValueError(f"`split_size` must be at least 1, got {split_size}")
    if cu_seqlens is None:
        if batch_size is None or seq_len is None:
            raise TypeError(
                "prepare_split_cu_seqlens: `cu_seqlens`, or `batch_size` and `seq_len`, are needed"
            )
        cu_seqlens = torch.arange(batch_size + 1) * seq_len
    offsets = cu_seqlens.long()
    owner, piece = _numbered(_chunks(offsets, split_size))
    starts = offsets[owner] + piece * split_size
    return torch.cat([starts, offsets[-1:]]).to(device=device, dtype=dtype)


@surface(ahead=True)
def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """``[T]``: each token's place in its sequence."""
    return _numbered(prepare_lens(_seen(cu_seqlens, cu_seqlens_cpu)))[1].to(cu_seqlens)


@surface(ahead=True)
def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """``[T]`` int64: each token's sequence."""
    return _numbered(prepare_lens(_seen(cu_seqlens, cu_seqlens_cpu)))[0].to(cu_seqlens.device)


@surface(ahead=True)
def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """``[T, 2]``: each token's sequence and its place there."""
    found = _numbered(prepare_lens(_seen(cu_seqlens, cu_seqlens_cpu)))
    return torch.stack(found, 1).to(cu_seqlens)


@surface(ahead=True)
def prepare_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """``[chunks, 2]``: each chunk's sequence and its number there."""
    found = _numbered(_chunks(_seen(cu_seqlens, cu_seqlens_cpu), chunk_size))
    return torch.stack(found, 1).to(cu_seqlens)


@surface(ahead=True)
def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """``[N + 1]`` int64: each sequence's first chunk, and the number of all chunks."""
    return prepare_cu_seqlens_from_lens(_chunks(cu_seqlens, chunk_size), torch.int64)


@surface(ahead=True)
def prepare_chunk_indices_static(
    cu_seqlens: Tensor, chunk_size: int, nt_max: int
) -> tuple[Tensor, Tensor]:
    """The same two lists in a size that does not depend on the lengths, without a wait.

    Rows past the last chunk have the sequence -1.

    Returns:
        ``[nt_max, 2]`` and ``[N + 1]``.
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    number = torch.arange(nt_max, device=cu_seqlens.device)
    owner = torch.searchsorted(offsets, number, right=True) - 1
    used = number < offsets[-1]
    place = number - offsets[owner.clamp(0, len(offsets) - 1)]
    indices = torch.stack([torch.where(used, owner, -1), torch.where(used, place, 0)], 1)
    return indices.to(cu_seqlens), offsets.to(cu_seqlens)


@surface(ahead=True)
def get_max_num_splits(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> int:
    """The number of chunks of the longest sequence."""
    return int(_chunks(_seen(cu_seqlens, cu_seqlens_cpu), chunk_size).max())
