"""Gates of this surface: per head or per channel, any leading shape."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional

from .._blocks import gate
from ._call import rows, wide


def check_form(A_log: Tensor | None, lower_bound: float | None) -> None:
    """The softplus form needs its factor."""
    if A_log is None and lower_bound is None:
        raise ValueError("`A_log` is needed where there is no `lower_bound`, got None")


def naive(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype,
    widths: int,
) -> Tensor:
    """The gate in plain torch; `widths` trailing dimensions of g belong to a token."""
    check_form(A_log, lower_bound)
    x = g.to(wide(g))
    shape = x.shape[-widths:]
    factor = x.new_ones(())
    if A_log is not None:
        factor = A_log.to(x.dtype).exp().reshape(shape[0], *[1] * (widths - 1))
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).reshape(shape)
    if lower_bound is None:
        return (-factor * functional.softplus(x)).to(output_dtype)
    return (lower_bound * torch.sigmoid(factor * x)).to(output_dtype)


def forward(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype | None,
    widths: int,
) -> Tensor:
    """The gate by the operator, differentiable."""
    check_form(A_log, lower_bound)
    shape = g.shape
    tokens = rows(g.reshape(1, -1, *shape[-widths:]))
    out = gate(
        tokens,
        gate="softplus" if lower_bound is None else "bounded",
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        dtype=g.dtype if output_dtype is None else output_dtype,
    )
    return out.view(shape)


def gradients(outputs: Any, inputs: Sequence[Tensor | None], grads: Any) -> list[Any]:
    """Gradients of the inputs that are there, None for the others; an unused one has zeros."""
    there = [x for x in inputs if x is not None]
    found = iter(torch.autograd.grad(outputs, there, grads, materialize_grads=True))
    return [None if x is None else next(found) for x in inputs]


@overload
def leaf(x: Tensor) -> Tensor: ...
@overload
def leaf(x: None) -> None: ...
def leaf(x: Tensor | None) -> Tensor | None:
    """The tensor as the start of a graph of its own."""
    return None if x is None else x.detach().requires_grad_()


def backward(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dyg: Tensor,
    lower_bound: float | None,
    widths: int,
) -> list[Tensor | None]:
    """The gradients of g, A_log and dt_bias, each like its tensor."""
    inputs = leaf(g), leaf(A_log), leaf(dt_bias)
    with torch.enable_grad():
        out = forward(*inputs, lower_bound, wide(g), widths)
    return gradients([out], inputs, [dyg.to(out.dtype)])
