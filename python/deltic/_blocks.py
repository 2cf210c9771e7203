"""The building blocks of the chunked form, each with its gradient."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._fakes import BLOCKS, register_fake
from ._library import OPS, call, got, kind_of, qualified, said_in
from ._native import (
    GATES,
    Gate,
    check_numbers,
    chunk_word,
    flag_word,
    name_word,
    needs_grad,
    word_for,
)
from ._sequence_ops import nothing, refuse_gradient, refuse_vmap, wanted, wide

_BLOCK_BACKWARD = OPS.block_backward.default
_BLOCK_OUT_ = OPS.block_out_.default
_NUMBERS = BLOCKS
# In the order of block_out_'s arguments.
_INPUTS = ("q", "k", "v", "x", "g", "beta", "A_log", "dt_bias", "a", "cu_seqlens", "cu_seqlens_cpu")
_OUTPUTS = ("out", "rstd", "inverse", "w", "u", "kg", "qg")
_REQUIRED = {
    name: tuple(
        x.name for x in getattr(OPS, name).default._schema.arguments if str(x.type) == "Tensor"
    )
    for name in BLOCKS
}
# Bits of `want`, in the order of block_backward's outputs.
_GRADIENTS = ("q", "k", "v", "x", "g", "beta", "a", "A_log", "dt_bias")


# ---- Fake implementations ---------------------------------------------------------------------


def _chunk_of(options: str) -> int:
    return int(said_in(options).get("chunk", 64))


def _square(
    k: Tensor, g: Tensor | None, beta: Tensor | None, options: str, dtype: torch.dtype | None
) -> Tensor:
    heads = next((x.shape[2] for x in (g, beta) if x is not None), k.shape[2])
    return k.new_empty(
        (k.shape[0], k.shape[1], heads, _chunk_of(options)), dtype=dtype or wide(k.dtype)
    )


@register_fake("cumsum")
def _cumsum_fake(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    return g.new_empty(g.shape, dtype=dtype or wide(g.dtype))


@register_fake("gate")
def _gate_fake(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    lower_bound: float | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    return g.new_empty(g.shape, dtype=dtype or wide(g.dtype))


@register_fake("l2norm")
def _l2norm_fake(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=dtype or x.dtype),
        x.new_empty(x.shape[:3], dtype=wide(x.dtype)),
    )


@register_fake("kkt")
def _kkt_fake(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _square(k, g, beta, options, dtype)


@register_fake("scores")
def _scores_fake(
    q: Tensor,
    k: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    scale: float | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _square(k, g, None, options, dtype)


@register_fake("inverse")
def _inverse_fake(
    a: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    return a.new_empty(a.shape, dtype=dtype or a.dtype)


@register_fake("scores_inverse")
def _scores_inverse_fake(
    q: Tensor,
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    scale: float | None = None,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return _square(k, g, beta, options, dtype), _square(k, g, beta, options, dtype)


@register_fake("wy")
def _wy_fake(
    k: Tensor,
    a: Tensor,
    v: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    q: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    output_kg: bool = False,
    options: str = "",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def rows(width: Any) -> Tensor:
        return k.new_empty((k.shape[0], k.shape[1], a.shape[2], width), dtype=dtype or k.dtype)

    return (
        rows(k.shape[3]),
        nothing(k) if v is None else rows(v.shape[3]),
        rows(k.shape[3]) if output_kg else nothing(k),
        nothing(k) if q is None else rows(k.shape[3]),
    )


@register_fake("block_out_")
def _block_out_fake(*args: Any, **kwargs: Any) -> None:
    return None


@register_fake("block_backward")
def _block_backward_fake(
    op: int,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    x: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    a: Tensor | None,
    out: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    d_out: Tensor | None,
    d_w: Tensor | None,
    d_u: Tensor | None,
    d_kg: Tensor | None,
    d_qg: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
    want: int = 511,
) -> tuple[Tensor, ...]:
    if not 2 <= op <= 8:
        raise ValueError(f"block_backward: op: expected a building block, 2 to 8, got {op}")
    inputs = (q, k, v, x, g, beta, out if a is None else a, A_log, dt_bias)
    like = next(tensor for tensor in inputs if tensor is not None)
    return tuple(
        nothing(like) if tensor is None or not want >> i & 1 else tensor.new_empty(tensor.shape)
        for i, tensor in enumerate(inputs)
    )


# ---- Gradients ----------------------------------------------------------------------------------


def _block_backward(
    name: str,
    given: Mapping[str, Tensor | None],
    came: Mapping[str, Tensor | None],
    options: tuple[float | None, float | None, str],
    needs: Mapping[str, bool],
) -> dict[str, Tensor]:
    """The gradients of a block, by the name of its input; empty tensors where not needed."""
    found = call(
        _BLOCK_BACKWARD,
        _NUMBERS[name],
        *(given.get(x) for x in ("q", "k", "v", "x", "g", "beta", "A_log", "dt_bias", "a", "out")),
        given.get("cu_seqlens"),
        given.get("cu_seqlens_cpu"),
        *(came.get(x) for x in ("out", "w", "u", "kg", "qg")),
        *options,
        wanted([needs.get(x, False) for x in _GRADIENTS]),
    )
    return dict(zip(_GRADIENTS, found, strict=True))


def _register_gradient(
    name: str, arguments: tuple[str, ...], outputs: tuple[str, ...] = ("out",)
) -> None:
    """Registers the gradient of a block with these arguments, in the order of its schema.

    ``outputs`` names the differentiable ones; what comes back for them is d_NAME of block_backward.
    """
    tensors = tuple(x for x in arguments if x in (*_GRADIENTS, "cu_seqlens", "cu_seqlens_cpu"))
    # The gradient of the inverse needs the result alone.
    from_result = name == "inverse"

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(arguments, inputs, strict=True))
        results = output if isinstance(output, tuple) else (output,)
        kept = {x: given[x] for x in tensors}
        if from_result:
            del kept["a"]
            kept["out"] = results[0]
        ctx.set_materialize_grads(False)
        ctx.names = tuple(kept)
        ctx.save_for_backward(*kept.values())
        ctx.options = (given.get("scale"), given.get("lower_bound"), given["options"])
        absent = [x for x in results if x.dim() == 1 and x.numel() == 0]
        ctx.mark_non_differentiable(*results[len(outputs) :], *absent)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        # The dispatcher leaves out trailing arguments that have their default.
        needs = dict(zip(arguments, ctx.needs_input_grad, strict=False))
        came = dict(zip(outputs, grads, strict=False))
        if all(grad is None for grad in came.values()):
            return (None,) * len(arguments)
        gradients = _block_backward(name, kept, came, ctx.options, needs)
        return tuple(gradients[x] if x in gradients and needs.get(x) else None for x in arguments)

    torch.library.register_autograd(qualified(name), backward, setup_context=setup)
    refuse_vmap(name)


_SEQUENCES = ("cu_seqlens", "cu_seqlens_cpu")
_GATE = ("g", "A_log", "dt_bias", *_SEQUENCES)
_register_gradient("cumsum", (*_GATE, "scale", "lower_bound", "options", "dtype"))
_register_gradient("gate", (*_GATE, "lower_bound", "options", "dtype"))
_register_gradient("l2norm", ("x", *_SEQUENCES, "options", "dtype"))
_register_gradient("kkt", ("k", "g", "beta", *_SEQUENCES, "options", "dtype"))
_register_gradient("scores", ("q", "k", "g", *_SEQUENCES, "scale", "options", "dtype"))
_register_gradient("inverse", ("a", *_SEQUENCES, "options", "dtype"))
_register_gradient(
    "wy",
    ("k", "a", "v", "g", "beta", "q", *_SEQUENCES, "output_kg", "options", "dtype"),
    ("w", "u", "kg", "qg"),
)


_SCORES_INVERSE = ("q", "k", "g", "beta", *_SEQUENCES, "scale", "options", "dtype")


def _scores_inverse_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = dict(zip(_SCORES_INVERSE, inputs, strict=True))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.options = (given["scale"], given["options"])


def _scores_inverse_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of scores, and that of kkt at the inverse's: the same operations, composed."""
    q, k, g, beta, cu, cu_cpu, inverse = ctx.saved_tensors
    scale, options = ctx.options
    needs = dict(zip(_SCORES_INVERSE, ctx.needs_input_grad, strict=False))
    lists = {"cu_seqlens": cu, "cu_seqlens_cpu": cu_cpu}
    found: dict[str, Tensor] = {}

    def add(gradients: dict[str, Tensor], names: tuple[str, ...]) -> None:
        for x in names:
            if needs.get(x):
                found[x] = found[x] + gradients[x] if x in found else gradients[x]

    if grads[0] is not None:
        given = {"q": q, "k": k, "g": g, **lists}
        came = {"out": grads[0]}
        add(_block_backward("scores", given, came, (scale, None, options), needs), ("q", "k", "g"))
    if grads[1] is not None:
        # In fp32: its gradient, which has its dtype, goes on into another operation.
        wide_inverse = inverse.to(wide(k.dtype))
        words = " ".join(x for x in options.split() if x.startswith(("as=", "impl=")))
        given = {"out": wide_inverse, **lists}
        came = {"out": grads[1]}
        da = _block_backward("inverse", given, came, (None, None, words), {"a": True})["a"]
        given = {"k": k, "g": g, "beta": beta, **lists}
        came = {"out": da}
        add(_block_backward("kkt", given, came, (None, None, options), needs), ("k", "g", "beta"))
    return tuple(found.get(x) for x in _SCORES_INVERSE)


torch.library.register_autograd(
    qualified("scores_inverse"), _scores_inverse_backward, setup_context=_scores_inverse_setup
)
refuse_vmap("scores_inverse")
refuse_gradient("block_backward")
refuse_vmap("block_backward")
refuse_vmap("block_out_")


# ---- Functions ----------------------------------------------------------------------------------


class L2Norm(NamedTuple):
    """What :func:`l2norm` returns."""

    y: Tensor
    rstd: Tensor


class ScoresInverse(NamedTuple):
    """What :func:`scores_inverse` returns."""

    scores: Tensor
    inverse: Tensor


class WY(NamedTuple):
    """What :func:`wy` returns; None for what was not asked for."""

    w: Tensor
    u: Tensor | None
    kg: Tensor | None
    qg: Tensor | None


def _words(
    op: str,
    *,
    gate: str = "log_decay",
    chunk_size: int = 64,
    reverse: bool = False,
    scale: float | None = None,
    lower_bound: float | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> str:
    """The options of a block; numbers and dtype, which go beside them, are looked at."""
    check_numbers(op, scale, lower_bound)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype: expected a torch.dtype, got {dtype!r}")
    words = f"as={op}" + word_for(op, "gate", gate, GATES)
    words += chunk_word(op, chunk_size)
    words += flag_word(op, "reverse", " reverse", reverse)
    return words + name_word(op, impl)


def _check_tensor(op: str, name: str, x: Any) -> None:
    """Raises the error for what is no dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name}: expected a tensor, got {got(x)}")
    if kind_of(x):
        raise TypeError(f"{op}: {name}: expected a dense tensor, got {kind_of(x)}")


def _parts_of(op: str, out: Any, asked: Mapping[str, bool]) -> tuple[Tensor | None, ...]:
    """The tensors of an ``out`` of several: those that are asked for, None for the others."""
    names, found = tuple(asked), tuple(out) if isinstance(out, (tuple, list)) else ()
    if len(found) != len(names):
        is_list = isinstance(out, (tuple, list))
        said = f"{len(found)} of them" if is_list else "a tensor"
        said = said if is_list or isinstance(out, Tensor) else got(out)
        raise (ValueError if is_list else TypeError)(
            f"{op}: out: expected ({', '.join(names)}), got {said}"
        )
    for name, x in zip(names, found, strict=True):
        if asked[name]:
            _check_tensor(op, f"out.{name}", x)
        elif x is not None:
            raise ValueError(f"{op}: out.{name}: expected none, as it is not asked for, got one")
    return found


def _write(
    op: str,
    block: str,
    inputs: Mapping[str, Tensor | None],
    outputs: Mapping[str, Tensor | None],
    words: str,
    dtype: torch.dtype | None,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> None:
    """A block into memory of the caller's."""
    for name in _REQUIRED[block]:
        _check_tensor(op, name, inputs[name])
    if "out" in outputs and len(outputs) == 1:
        _check_tensor(op, "out", outputs["out"])
    if dtype is not None:
        raise ValueError(f"{op}: dtype: expected none with out, which has its own, got {dtype}")
    if needs_grad((*inputs.values(), *outputs.values())):
        raise ValueError(
            f"{op}: out: expected none where gradients are asked for (use torch.no_grad()), got one"
        )
    call(
        _BLOCK_OUT_,
        _NUMBERS[block],
        *(inputs.get(x) for x in _INPUTS),
        *(outputs.get(x) for x in _OUTPUTS),
        scale,
        lower_bound,
        words,
    )


def chunk_cumsum(
    g: Tensor,
    *,
    scale: float | None = None,
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    reverse: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The cumulative sum of a log decay inside of chunks, of g or of the gate's form of it.

    ``deltic.cumsum`` is its older name.

    Args:
        g: ``[B, T, HV]`` or ``[B, T, HV, K]``; gate, A_log, dt_bias, lower_bound and cu_seqlens as
            in :func:`deltic.delta_rule`. Chunks are counted from each sequence's start.
        scale: of the result, by default 1.
        reverse: sums from the chunk's end.
        dtype: of the result, by default fp32.
        out: of the result's shape, in which it is written and returned; it has its own dtype.
            Such a call has no gradient.

    Returns:
        A tensor of g's shape.

    >>> import torch, deltic
    >>> deltic.chunk_cumsum(torch.full((1, 5, 1), -1.0), chunk_size=16).flatten().tolist()
    [-1.0, -2.0, -3.0, -4.0, -5.0]
    """
    words = _words(
        "chunk_cumsum",
        gate=gate,
        chunk_size=chunk_size,
        reverse=reverse,
        scale=scale,
        lower_bound=lower_bound,
        dtype=dtype,
        impl=impl,
    )
    if out is not None:
        inputs = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        numbers = (scale, lower_bound)
        _write("chunk_cumsum", "cumsum", inputs, {"out": out}, words, dtype, *numbers)
        return out
    result: Tensor = call(
        OPS.cumsum.default,
        g,
        A_log,
        dt_bias,
        cu_seqlens,
        cu_seqlens_cpu,
        scale,
        lower_bound,
        words,
        dtype,
    )
    return result


def log_decay(
    g: Tensor,
    *,
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The log decay that a gate's form makes of what a layer projects.

    ``deltic.gate`` is its older name.

    Args:
        g: ``[B, T, HV]`` or ``[B, T, HV, K]``; the other arguments as in :func:`deltic.delta_rule`.
        dtype: of the result, by default fp32.
        out: of the result's shape, in which it is written and returned; it has its own dtype.
            Such a call has no gradient.

    Returns:
        The log decay, a tensor of g's shape.

    >>> import torch, deltic
    >>> g = deltic.log_decay(torch.zeros(1, 1, 2), gate="softplus", A_log=torch.zeros(2))
    >>> bool(torch.allclose(g, -torch.log(torch.tensor(2.0))))
    True
    """
    words = _words("log_decay", gate=gate, lower_bound=lower_bound, dtype=dtype, impl=impl)
    if out is not None:
        inputs = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        outputs = {"out": out}
        _write("log_decay", "gate", inputs, outputs, words, dtype, None, lower_bound)
        return out
    result: Tensor = call(
        OPS.gate.default,
        g,
        A_log,
        dt_bias,
        cu_seqlens,
        cu_seqlens_cpu,
        lower_bound,
        words,
        dtype,
    )
    return result


cumsum, gate = chunk_cumsum, log_decay


def l2norm(
    x: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    impl: str | None = None,
) -> L2Norm:
    """Rows divided by ``sqrt(sum(x ** 2) + 1e-6)``.

    Args:
        x: ``[B, T, H, D]``.
        dtype: of the result, by default x's.
        out: ``(y, rstd)``, in which the results are written and returned; they have their own
            dtypes. Such a call has no gradient.

    Returns:
        ``y``, the rows, and ``rstd``, one over their norms ``[B, T, H]`` in fp32, which has no
        gradient.

    >>> import torch, deltic
    >>> y, rstd = deltic.l2norm(torch.full((1, 1, 1, 4), 2.0))
    >>> [round(number, 3) for number in y.flatten().tolist()], round(rstd.item(), 3)
    ([0.5, 0.5, 0.5, 0.5], 0.25)
    """
    words = _words("l2norm", dtype=dtype, impl=impl)
    if out is not None:
        y, rstd = _parts_of("l2norm", out, {"y": True, "rstd": True})
        inputs = {"x": x, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        _write("l2norm", "l2norm", inputs, {"out": y, "rstd": rstd}, words, dtype)
        return L2Norm(*out)
    y, rstd = call(OPS.l2norm.default, x, cu_seqlens, cu_seqlens_cpu, words, dtype)
    return L2Norm(y, rstd)


def kkt(
    k: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """``beta_i * sum_d k_id k_jd exp(G_id - G_jd)`` for j < i inside of chunks, else 0.

    Args:
        k: ``[B, T, H, K]``.
        g: the cumulative sum G of the log decay, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        dtype: of the result, by default fp32.
        out: of the result's shape, in which it is written and returned; it has its own dtype.
            Such a call has no gradient.

    Returns:
        ``[B, T, HV, chunk_size]``: row i of each chunk, with HV of g or beta, else H.

    >>> import torch, deltic
    >>> deltic.kkt(torch.ones(1, 3, 1, 2), chunk_size=16)[0, :, 0, :3].tolist()
    [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [2.0, 2.0, 0.0]]
    """
    words = _words("kkt", chunk_size=chunk_size, dtype=dtype, impl=impl)
    if out is not None:
        inputs = {"k": k, "g": g, "beta": beta}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        _write("kkt", "kkt", inputs, {"out": out}, words, dtype)
        return out
    result: Tensor = call(OPS.kkt.default, k, g, beta, cu_seqlens, cu_seqlens_cpu, words, dtype)
    return result


def scores(
    q: Tensor,
    k: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """``scale * sum_d q_id k_jd exp(G_id - G_jd)`` for j <= i inside of chunks, else 0.

    Args:
        q, k: ``[B, T, H, K]``.
        g: the cumulative sum G of the log decay, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        scale: by default ``K ** -0.5``.
        dtype: of the result, by default fp32.
        out: of the result's shape, in which it is written and returned; it has its own dtype.
            Such a call has no gradient.

    Returns:
        ``[B, T, HV, chunk_size]``, with HV of g, else H.

    >>> import torch, deltic
    >>> ones = torch.ones(1, 2, 1, 4)
    >>> deltic.scores(ones, ones, chunk_size=16)[0, :, 0, :2].tolist()
    [[2.0, 0.0], [2.0, 2.0]]
    """
    words = _words("scores", chunk_size=chunk_size, scale=scale, dtype=dtype, impl=impl)
    if out is not None:
        inputs = {"q": q, "k": k, "g": g}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        _write("scores", "scores", inputs, {"out": out}, words, dtype, scale)
        return out
    lists = (cu_seqlens, cu_seqlens_cpu)
    result: Tensor = call(OPS.scores.default, q, k, g, *lists, scale, words, dtype)
    return result


def inverse(
    a: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """``(I + A)^-1`` per chunk; only entries below the diagonal are read.

    Args:
        a: ``[B, T, HV, W]``, as :func:`deltic.kkt` gives it; W, 16, 32 or 64, is the chunk length.
        dtype: of the result, by default a's.
        out: of the result's shape, in which it is written and returned; it has its own dtype.
            Such a call has no gradient.

    Returns:
        A tensor of a's shape, with a unit diagonal and zeros above it.

    >>> import torch, deltic
    >>> a = deltic.kkt(torch.ones(1, 3, 1, 1), chunk_size=16)
    >>> deltic.inverse(a)[0, :, 0, :3].tolist()
    [[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]]
    """
    words = _words("inverse", dtype=dtype, impl=impl)
    if out is not None:
        inputs = {"a": a, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        _write("inverse", "inverse", inputs, {"out": out}, words, dtype)
        return out
    result: Tensor = call(OPS.inverse.default, a, cu_seqlens, cu_seqlens_cpu, words, dtype)
    return result


def scores_inverse(
    q: Tensor,
    k: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    impl: str | None = None,
) -> ScoresInverse:
    """:func:`deltic.scores`, and :func:`deltic.inverse` of :func:`deltic.kkt`, in one pass.

    q, k and g are read once, and what is inverted is never rounded in between.

    Args:
        q, k: ``[B, T, H, K]``.
        g: the cumulative sum G of the log decay, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``, of the inverse.
        scale: of the scores, by default ``K ** -0.5``.
        dtype: of the results, by default fp32.
        out: ``(scores, inverse)``, in which the results are written and returned; they have their
            own dtypes. Such a call has no gradient.

    Returns:
        ``scores`` and ``inverse``, both ``[B, T, HV, chunk_size]``, with HV of g or beta, else H.

    >>> import torch, deltic
    >>> ones = torch.ones(1, 2, 1, 4)
    >>> scores, inverse = deltic.scores_inverse(ones, ones, chunk_size=16)
    >>> scores[0, :, 0, :2].tolist(), inverse[0, :, 0, :2].tolist()
    ([[2.0, 0.0], [2.0, 2.0]], [[1.0, 0.0], [-4.0, 1.0]])
    """
    words = _words("scores_inverse", chunk_size=chunk_size, scale=scale, dtype=dtype, impl=impl)
    if out is not None:
        scores, inverse = _parts_of("scores_inverse", out, {"scores": True, "inverse": True})
        inputs = {"q": q, "k": k, "g": g, "beta": beta}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        outputs = {"out": scores, "inverse": inverse}
        _write("scores_inverse", "scores_inverse", inputs, outputs, words, dtype, scale)
        return ScoresInverse(*out)
    scores, inverse = call(
        OPS.scores_inverse.default, q, k, g, beta, cu_seqlens, cu_seqlens_cpu, scale, words, dtype
    )
    return ScoresInverse(scores, inverse)


def wy(
    k: Tensor,
    a: Tensor,
    *,
    v: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    q: Tensor | None = None,
    output_kg: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None = None,
    impl: str | None = None,
) -> WY:
    """The WY pair of a chunk and the gated rows that go with it.

    Args:
        k: ``[B, T, H, K]``.
        a: ``[B, T, HV, W]``, as :func:`deltic.inverse` gives it.
        v: ``[B, T, HV, V]``, for u.
        g: the cumulative sum G of the log decay, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        q: ``[B, T, H, K]``, for qg.
        output_kg: returns kg.
        dtype: of the results, by default k's.
        out: ``(w, u, kg, qg)``, in which the results are written and returned, None for what is
            not asked for; they have their own dtypes. Such a call has no gradient.

    Returns:
        ``w = A (beta k exp(G)) [B, T, HV, K]``, ``u = A (beta v) [B, T, HV, V]``,
        ``kg = k exp(G_last - G)`` and ``qg = q exp(G)``, both ``[B, T, HV, K]``; None for what was
        not asked for.

    >>> import torch, deltic
    >>> k, v = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 4)
    >>> w, u, kg, qg = deltic.wy(k, deltic.inverse(deltic.kkt(k)), v=v)
    >>> w.shape, u.shape, kg, qg
    (torch.Size([1, 20, 1, 8]), torch.Size([1, 20, 1, 4]), None, None)
    """
    words = _words("wy", dtype=dtype, impl=impl)
    if out is not None:
        asked = {"w": True, "u": v is not None, "kg": output_kg, "qg": q is not None}
        outputs = dict(zip(asked, _parts_of("wy", out, asked), strict=True))
        inputs = {"k": k, "a": a, "v": v, "g": g, "beta": beta, "q": q}
        inputs |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        _write("wy", "wy", inputs, outputs, words, dtype)
        return WY(*out)
    w, u, kg, qg = call(
        OPS.wy.default,
        k,
        a,
        v,
        g,
        beta,
        q,
        cu_seqlens,
        cu_seqlens_cpu,
        output_kg,
        words,
        dtype,
    )
    return WY(w, None if v is None else u, kg if output_kg else None, None if q is None else qg)
