"""The stages of Gated DeltaNet inside of a chunk."""

from torch import Tensor

from ... import _chunks
from ..._surface import surface


@surface(ahead=True, g="B,T,HV")
def chunk_gated_delta_rule_fwd_intra(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The WY pair and the inverse it comes from.

    Args:
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: the cumulative gate in base 2, ``[B, T, HV]``.
        beta: ``[B, T, HV]``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        chunk_size: 16, 32 or 64.
        chunk_indices: not needed here, and not read.

    Returns:
        ``w [B, T, HV, K]``, ``u [B, T, HV, V]`` and ``A [B, T, HV, chunk_size]`` in k's dtype.
    """
    w, u, _, _, A = _chunks.intra(k, v, _chunks.natural(g), beta, cu_seqlens, chunk_size)
    return w, u, A
