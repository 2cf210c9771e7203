"""The WY pair of DeltaNet: ``w = A (beta k)``, ``u = A (beta v)``, ``A = (I + beta k k^T)^-1``."""

import torch
from torch import Tensor

from ... import _chunks
from ..._surface import surface


@surface()
def prepare_wy_repr_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """w and u, and the inverse ``A [B, T, HV, chunk_size]`` in k's dtype."""
    w, u, _, _, A = _chunks.intra(k, v, None, beta, cu_seqlens, chunk_size)
    return w, u, A


@surface()
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w and u from the inverse A."""
    w, u, _, _ = _chunks.pair(k, v, beta, A, None, cu_seqlens)
    return w, u


@surface(ahead=True)
@torch.no_grad()
def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of k, v and beta (in its dtype) for those of w and u."""
    dk, dv, db, _ = _chunks.pair_gradients(k, v, beta, A, dw, du, None, cu_seqlens)
    return dk, dv, db.to(beta.dtype)


fwd_prepare_wy_repr = prepare_wy_repr_fwd
bwd_prepare_wy_repr = prepare_wy_repr_bwd
fwd_recompute_w_u = recompute_w_u_fwd
