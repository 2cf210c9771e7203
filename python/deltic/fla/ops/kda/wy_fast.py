"""The WY pair of Kimi Delta Attention: ``w = A (beta k 2^G)``, ``u = A (beta v)``; G in base 2."""

import torch
from torch import Tensor

from ... import _chunks, _gates
from ..._surface import surface


@surface(ahead=True)
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    gk: Tensor,
    q: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """w, u, ``qg = q 2^G`` (None without q) and ``kg = k 2^(G_last - G)``.

    ``A [B, T, HV, C]`` is the inverse, ``gk [B, T, HV, K]`` the cumulative gate.
    """
    w, u, qg, kg = _chunks.pair(k, v, beta, A, _chunks.natural(gk), cu_seqlens, q, output_kg=True)
    assert kg is not None
    return w, u, qg, kg


@surface(ahead=True, dk="B,T,HV,K", dg="B,T,HV,K")
@torch.no_grad()
def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gk: Tensor,
    A: Tensor,
    dk: Tensor,
    dw: Tensor,
    du: Tensor,
    dg: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients for those of w and u with A held fixed, and the one that A passes on.

    ``dk`` and ``dg``, both ``[B, T, HV, K]``, are what was found elsewhere, and are added to.

    Returns:
        ``dk`` per value head, ``dv`` in v's dtype, ``dbeta``, the gradient of the natural
        cumulative gate, and ``dA [B, T, HV, C]``, the gradient of the matrix that A is the inverse
        of. All others are in fp32.
    """
    group = v.shape[2] // k.shape[2]
    key = _gates.leaf(k.float().repeat_interleave(group, 2))
    values, b, a = (_gates.leaf(x.float().contiguous()) for x in (v, beta, A))
    G = _gates.leaf(_chunks.natural(gk))
    with torch.enable_grad():
        w, u, _, _ = _chunks.pair(key, values, b, a, G, cu_seqlens)
    found = _gates.gradients([w, u], [key, values, b, G, a], [dw.float(), du.float()])
    dA = _chunks.inverse_gradient(a.detach(), found[4], cu_seqlens)
    return found[0] + dk, found[1].to(v.dtype), found[2], found[3] + dg, dA
