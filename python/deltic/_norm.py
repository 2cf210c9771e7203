"""The gated RMS norm behind the delta rule, with its gradient."""

from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from ._fakes import register_fake
from ._library import OPS, call, got, kind_of, qualified
from ._native import is_eps, name_word, needs_grad
from ._sequence_ops import below_autograd, nothing, refuse_gradient, refuse_vmap, wanted

GateActivation = Literal["silu", "sigmoid"] | None

_RMSNORM = OPS.rmsnorm.default
_RMSNORM_OUT_ = OPS.rmsnorm_out_.default
_RMSNORM_BACKWARD = OPS.rmsnorm_backward.default
_ACTIVATIONS = {None: "", "silu": " activation=silu", "sigmoid": " activation=sigmoid"}


@register_fake("rmsnorm")
def _rmsnorm_fake(
    x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, options: str = ""
) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("rmsnorm_out_")
def _rmsnorm_out_fake(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    options: str = "",
) -> None:
    return None


@register_fake("rmsnorm_backward")
def _rmsnorm_backward_fake(
    d_out: Tensor,
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float,
    options: str = "",
    want: int = 7,
) -> tuple[Tensor, ...]:
    return tuple(
        nothing(x) if tensor is None or not want >> i & 1 else tensor.new_empty(tensor.shape)
        for i, tensor in enumerate((x, z, weight))
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, z, weight, ctx.eps, ctx.options = inputs
    ctx.save_for_backward(x, z, weight)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    if d_out.stride(-1) != 1:  # as from sum(); the operator would log a copy nobody can avoid
        d_out = d_out.contiguous()
    # With create_graph the operator's own gradient, an error, must stay in the way.
    found = call(
        _RMSNORM_BACKWARD if torch.is_grad_enabled() else below_autograd(_RMSNORM_BACKWARD),
        d_out,
        *ctx.saved_tensors,
        ctx.eps,
        ctx.options,
        wanted(needs),
    )
    gradients = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    return (*gradients, None, None)


torch.library.register_autograd(qualified("rmsnorm"), _backward, setup_context=_setup)
refuse_gradient("rmsnorm_backward")
for _name in ("rmsnorm", "rmsnorm_out_", "rmsnorm_backward"):
    refuse_vmap(_name)


def _as_heads(x: Tensor) -> Tensor:
    """``[..., D]`` as ``[B, T, H, D]`` with at least one head."""
    if x.dim() < 4:
        return x[(None,) * (3 - x.dim())].unsqueeze(-2)
    if x.shape[-2] == 0:
        return x.reshape(1, 0, 1, x.shape[-1])
    return x.flatten(0, -4)


def _as_view(out: Tensor) -> Tensor:
    """The same of what is written, which a copy would not reach."""
    heads = _as_heads(out)
    if heads.numel() and heads.data_ptr() != out.data_ptr():
        raise ValueError(
            "rms_norm: out: expected leading dimensions that are one by their strides, got shape "
            f"{list(out.shape)}, strides {list(out.stride())}"
        )
    return heads


def _autocast(x: Tensor) -> Tensor:
    """A tensor as autocast gives it to torch's own norms: in fp32 on a GPU."""
    is_cast = isinstance(x, Tensor) and x.device.type == "cuda" and x.dtype != torch.float64
    return x.float() if is_cast and torch.is_autocast_enabled("cuda") else x


def _check_rows(argument: str, x: Tensor) -> None:
    """Raises the error for what is no dense tensor of rows."""
    if not isinstance(x, Tensor):
        raise TypeError(f"rms_norm: {argument}: expected a tensor, got {got(x)}")
    if kind_of(x):
        raise TypeError(f"rms_norm: {argument}: expected a dense tensor, got {kind_of(x)}")
    if x.dim() == 0:
        raise ValueError(f"rms_norm: {argument}: expected shape [..., D], got []")


def check_eps(function: str, eps: Any) -> None:
    """Raises the error for what is no finite number of at least 0, or none that fp32 holds."""
    if is_eps(eps):
        return
    is_number = isinstance(eps, Real) and not isinstance(eps, bool)
    kind = ValueError if is_number else TypeError
    found = "a tensor" if isinstance(eps, Tensor) else got(eps)
    if is_number and not isinstance(eps, int):
        found = got(float(eps))
    raise kind(f"{function}: eps: expected a finite number of at least 0, got {found}")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    z: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: GateActivation = "silu",
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight * activation(z)`` over the last dimension.

    In one pass, with fp32 arithmetic; its gradient keeps x, z and weight alone.

    Args:
        x: ``[..., D]``, fp32, bf16 or fp16.
        weight: ``[D]``, fp32, bf16 or fp16, whatever x has.
        z: the gate, x's shape; without it there is no activation.
        eps: what is added to the mean square.
        activation: of z: ``"silu"``, ``"sigmoid"`` or None, z itself.
        out: of x's shape, in which the rows are written and returned; not x itself. Such a call has
            no gradient.
        impl: the name of an implementation, by default the best that takes the call. float64 runs
            in the oracle only, ``"reference"``.

    Returns:
        The normed rows, in x's shape and dtype.

    Under autocast it does what ``torch.nn.functional.rms_norm`` does: on a GPU x and z are cast to
    fp32, and so is the result; on a CPU nothing changes.

    >>> import torch, deltic
    >>> x, z = torch.tensor([[3.0, -3.0]]), torch.zeros(1, 2)
    >>> deltic.rms_norm(x, z=z, eps=0.0, activation="sigmoid").tolist()
    [[0.5, -0.5]]
    """
    z = None if z is None else _autocast(z)
    return plain_rms_norm(_autocast(x), weight, z, eps, activation, impl, out)


def plain_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    eps: float,
    activation: GateActivation,
    impl: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`rms_norm` of the tensors as they are, whatever autocast says: what layers call."""
    try:
        word = _ACTIVATIONS[activation]
    except (KeyError, TypeError):
        raise ValueError(
            f"rms_norm: activation: expected None, 'silu' or 'sigmoid', got {activation!r}"
        ) from None
    _check_rows("x", x)
    if z is not None:
        _check_rows("z", z)
        if z.shape != x.shape:
            raise ValueError(
                f"rms_norm: z: expected x's shape {list(x.shape)}, got {list(z.shape)}"
            )
    check_eps("rms_norm", eps)
    words = "as=rms_norm" + (word if z is not None else "")
    if impl is not None:
        words += name_word("rms_norm", impl)
    gate = None if z is None else _as_heads(z)
    if out is not None:
        _check_rows("out", out)
        if out.shape != x.shape:
            raise ValueError(
                f"rms_norm: out: expected x's shape {list(x.shape)}, got {list(out.shape)}"
            )
        if not out.is_floating_point():
            name = str(out.dtype).removeprefix("torch.")
            raise TypeError(f"rms_norm: out: expected fp32, bf16 or fp16, got {name}")
        if needs_grad((x, z, weight, out)):
            raise ValueError(
                "rms_norm: out: expected none where gradients are asked for (use "
                "torch.no_grad()), got one"
            )
        call(_RMSNORM_OUT_, _as_heads(x), gate, weight, _as_view(out), float(eps), words)
        return out
    y: Tensor = call(_RMSNORM, _as_heads(x), gate, weight, float(eps), words)
    return y.view(x.shape)
