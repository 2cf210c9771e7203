"""The stages of Kimi Delta Attention inside of a chunk."""

from torch import Tensor

from ...._blocks import scores
from ... import _chunks
from ..._call import rows
from ..._surface import surface


@surface(ahead=True)
def chunk_kda_fwd_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    use_graph: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The scores, the inverse, the WY pair and the gated rows.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        gk: the cumulative gate in base 2, ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        scale: of q, by default ``K ** -0.5``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        chunk_size: 16, 32 or 64.
        disable_recompute: returns qg.
        chunk_indices, safe_gate, lower_bound, use_graph: not needed here, and not read.

    Returns:
        ``w``, ``u``, ``qg = q 2^G`` (or None), ``kg = k 2^(G_last - G)``, ``Aqk`` and ``Akk``, the
        scores and the inverse ``[B, T, HV, chunk_size]`` in k's dtype.
    """
    G = _chunks.natural(gk)
    w, u, qg, kg, Akk = _chunks.intra(
        k, v, G, beta, cu_seqlens, chunk_size, q if disable_recompute else None, output_kg=True
    )
    Aqk = scores(
        rows(q),
        rows(k),
        g=G,
        scale=scale,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        dtype=k.dtype,
    )
    assert kg is not None
    return w, u, qg, kg, Aqk, Akk
