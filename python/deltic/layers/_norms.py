"""RMS norm, alone or times an activated gate; arithmetic in fp32, results in the input's dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _norm
from .._conv import has_kernels
from ._checks import check_rows, expect, expect_eps, expect_size

GATE_ACTIVATIONS = ("swish", "silu", "sigmoid")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide_dtype(x))
    return (norm.square() / x.shape[-1] + eps).rsqrt()


def _activated(gate: Tensor, is_sigmoid: bool) -> Tensor:
    gate = gate.to(_wide_dtype(gate))
    return gate.sigmoid() if is_sigmoid else F.silu(gate)


def _times(y: Tensor, factor: Tensor) -> Tensor:
    # In place spares fresh memory; a compiler fuses, and must be left the gradient.
    return y * factor if torch.compiler.is_compiling() else y.mul_(factor)


def _value(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, is_sigmoid: bool
) -> Tensor:
    y = x * _reciprocal_rms(x, eps)
    if weight is not None:
        y = _times(y, weight)
    if gate is not None:
        y = _times(y, _activated(gate, is_sigmoid))
    return y.to(x.dtype)


class _GatedNorm(torch.autograd.Function):
    """Keeps x and the gate only; autograd of the formula keeps five fp32 tensors more.

    The gradient consists of differentiable operations: it has gradients of its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        gate: Tensor | None,
        eps: float,
        is_sigmoid: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.is_sigmoid = eps, is_sigmoid
        return _value(x, weight, gate, eps, is_sigmoid)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        scale = _reciprocal_rms(x, ctx.eps)
        normed = x * scale
        dy = dy.to(normed.dtype)
        d_gate = None
        if gate is not None:
            wide = gate.to(normed.dtype)
            d_active = dy * normed if weight is None else dy * normed * weight
            sigmoid = wide.sigmoid()
            if ctx.is_sigmoid:
                active, slope = sigmoid, sigmoid * (1 - sigmoid)
            else:
                active = wide * sigmoid
                slope = sigmoid + active * (1 - sigmoid)
            d_gate = (d_active * slope).to(gate.dtype)
            dy = dy * active
        d_weight = None
        if weight is not None:
            d_weight = (dy * normed).sum_to_size(weight.shape).to(weight.dtype)
            dy = dy * weight
        dx = scale * (dy - normed * (dy * normed).mean(dim=-1, keepdim=True))
        return dx.to(x.dtype), d_weight, d_gate, None, None


def _is_native(x: Tensor) -> bool:
    """Whether deltic's operator takes such rows; else a few plain operations do."""
    return x.dtype in _DTYPES and x.dim() > 0 and x.stride(-1) == 1 and has_kernels(x)


def rms_norm(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, is_sigmoid: bool
) -> Tensor:
    """The RMS norm over the last dimension, times a weight, times an activated gate."""
    is_compiling = torch.compiler.is_compiling()  # a compiler fuses the formula with its neighbours
    if not is_compiling and _is_native(x) and (gate is None or _is_native(gate)):
        activation: _norm.GateActivation = "sigmoid" if is_sigmoid else "silu"
        return _norm.plain_rms_norm(x, weight, gate, eps, activation)
    if is_compiling or not torch.is_grad_enabled():
        return _value(x, weight, gate, eps, is_sigmoid)
    found: Tensor = _GatedNorm.apply(x, weight, gate, eps, is_sigmoid)
    return found


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; an fp32 weight.

    >>> import torch
    >>> from deltic.layers import RMSNorm
    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, -3.0]])).round(decimals=4).tolist()
    [[1.0, -1.0]]
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        expect_size("RMSNorm", "hidden_size", hidden_size)
        expect_eps("RMSNorm", "eps", eps)
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        check_rows("RMSNorm", "x", x, self.hidden_size)
        return rms_norm(x, self.weight, None, self.eps, False)


class GatedRMSNorm(nn.Module):
    """The RMS norm of x times ``swish(gate)`` or ``sigmoid(gate)``.

    >>> import torch
    >>> from deltic.layers import GatedRMSNorm
    >>> norm = GatedRMSNorm(2, eps=0.0, activation="sigmoid")
    >>> norm(torch.tensor([[3.0, -3.0]]), torch.zeros(1, 2)).round(decimals=4).tolist()
    [[0.5, -0.5]]
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "swish") -> None:
        super().__init__()
        expect_size("GatedRMSNorm", "hidden_size", hidden_size)
        expect_eps("GatedRMSNorm", "eps", eps)
        expect(
            activation in GATE_ACTIVATIONS,
            "GatedRMSNorm",
            "activation",
            "'swish', 'silu' or 'sigmoid'",
            activation,
        )
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        check_rows("GatedRMSNorm", "x", x, self.hidden_size)
        check_rows("GatedRMSNorm", "gate", gate, self.hidden_size)
        if gate.shape != x.shape:
            raise ValueError(
                f"GatedRMSNorm: gate: expected x's shape {list(x.shape)}, got {list(gate.shape)}"
            )
        return rms_norm(x, self.weight, gate, self.eps, self.activation == "sigmoid")
