"""The stages inside of a chunk and their gradients, for all three kinds of gate.

Cumulative gates are in base 2 at this surface and natural below it; their gradients are those of
the natural sum.
"""

from typing import Any

import torch
from torch import Tensor

from .._blocks import _BLOCK_BACKWARD, _NUMBERS, inverse, kkt, wy
from .._library import call
from ._call import rows
from ._gates import gradients, leaf
from .ops.utils.constant import LN2


def natural(g: Tensor | None) -> Tensor | None:
    """A cumulative gate of base 2 as one of base e."""
    return None if g is None else rows(g * LN2)


def check_chunk_size(chunk_size: int) -> None:
    """The chunk lengths there are."""
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32 or 64, got {chunk_size}")


def intra(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    q: Tensor | None = None,
    output_kg: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """w, u, qg, kg and the inverse A in k's dtype, from the natural cumulative gate."""
    check_chunk_size(chunk_size)
    lower = kkt(rows(k), g=g, beta=rows(beta), chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    a = inverse(lower, cu_seqlens=cu_seqlens)
    w, u, qg, kg = pair(k, v, beta, a, g, cu_seqlens, q, output_kg)
    return w, u, qg, kg, a.to(k.dtype)


def pair(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    A: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    q: Tensor | None = None,
    output_kg: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w, u, qg and kg from the inverse A and the natural cumulative gate."""
    w, u, kg, qg = wy(
        rows(k),
        rows(A),
        v=rows(v),
        g=g,
        beta=rows(beta),
        q=rows(q),
        output_kg=output_kg,
        cu_seqlens=cu_seqlens,
    )
    assert u is not None
    return w, u.to(v.dtype), qg, kg


def inverse_gradient(a: Tensor, da: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The gradient of the matrix under the diagonal for that of its inverse ``a``."""
    arguments: list[Any] = [None] * 18
    arguments[0], arguments[10], arguments[11] = _NUMBERS["inverse"], a, cu_seqlens
    arguments[13] = rows(da)
    found: Tensor = call(_BLOCK_BACKWARD, *arguments)[6]
    return found


class _Given(torch.autograd.Function):
    """The inverse that the caller has, with the gradient of the matrix it is the inverse of."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, a: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, cu_seqlens)
        return a.clone()

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, None, None]:
        return inverse_gradient(ctx.saved_tensors[0], da, ctx.saved_tensors[1]), None, None


def pair_gradients(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dk, dv, dbeta and dG (None without g) for the gradients of w and u, through A as well.

    Everything is computed in fp32 and comes back so, except dk and dv: in their tensors' dtypes.
    """
    wide_k, wide_v, wide_beta = (leaf(x.float()) for x in (k, v, beta))
    G = leaf(natural(g))
    with torch.enable_grad():
        lower = kkt(
            rows(wide_k),
            g=G,
            beta=rows(wide_beta),
            chunk_size=A.shape[-1],
            cu_seqlens=cu_seqlens,
        )
        a = _Given.apply(lower, rows(A.float()), cu_seqlens)
        w, u, _, _ = pair(wide_k, wide_v, wide_beta, a, G, cu_seqlens)
    inputs = [wide_k, wide_v, wide_beta, G]
    dk, dv, db, dg = gradients([w, u], inputs, [dw.float(), du.float()])
    return dk.to(k.dtype), dv.to(v.dtype), db, dg
