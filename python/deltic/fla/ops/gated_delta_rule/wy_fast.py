"""The WY pair of Gated DeltaNet: ``w = A (beta k 2^G)``, ``u = A (beta v)``; G in base 2."""

import torch
from torch import Tensor

from ... import _chunks
from ..._surface import surface


@surface(ahead=True, g="B,T,HV")
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w and u from the inverse ``A [B, T, HV, C]`` and the cumulative gate ``g [B, T, HV]``."""
    w, u, _, _ = _chunks.pair(k, v, beta, A, _chunks.natural(g), cu_seqlens)
    return w, u


@surface(ahead=True, g="B,T,HV")
@torch.no_grad()
def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of k, v, beta and of the natural cumulative gate for those of w and u.

    Each is like its tensor; that of the gate is None without g.
    """
    dk, dv, db, dg = _chunks.pair_gradients(k, v, beta, A, dw, du, g, cu_seqlens)
    return dk, dv, db.to(beta.dtype), None if g is None or dg is None else dg.to(g.dtype)


fwd_recompute_w_u = recompute_w_u_fwd
bwd_prepare_wy_repr = prepare_wy_repr_bwd
