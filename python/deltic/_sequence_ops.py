"""Fake implementations and gradients of forward, backward and decode."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._fakes import register_fake
from ._library import (
    OPS,
    call,
    function_of,
    is_transformed,
    qualified,
    said_in,
    saved_bytes,
)

FORWARD = OPS.forward.default
FORWARD_SAVE = OPS.forward_save.default
FORWARD_ = OPS.forward_.default
BACKWARD = OPS.backward.default
DECODE = OPS.decode.default
DECODE_ = OPS.decode_.default
# With everything that servers have, and an output of the caller's.
FORWARD_OUT_ = OPS.forward_out_.default
DECODE_OUT_ = OPS.decode_out_.default
DECODE_RECORD_ = OPS.decode_record_.default

# Bits of `want`, in the order of backward's outputs.
_GRADIENTS = ("q", "k", "v", "beta", "g", "gv", "A_log", "dt_bias", "initial_state")


def nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What an output that was not asked for comes back as."""
    return like.new_empty((0,), dtype=dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what is kept in fp32: fp64 where the inputs are (the oracle)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wanted(needs: Sequence[bool]) -> int:
    """The bit mask of the gradients asked for."""
    return sum(1 << i for i, need in enumerate(needs) if need)


def refuse_vmap(name: str) -> None:
    """Registers that torch.vmap over an operator is an error."""

    def refuse(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> NoReturn:
        function = function_of(name, (*args, *kwargs.values()))
        raise NotImplementedError(
            f"{function}: vmap: expected a batch in the first dimension (or packed sequences), "
            "got a call under torch.vmap"
        )

    torch.library.register_vmap(qualified(name), refuse)


def refuse_gradient(name: str) -> None:
    """Registers that an operator that is itself a gradient has none."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = function_of(name, inputs)

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"{ctx.function}: create_graph: expected first gradients only, got a gradient of a "
            "gradient (double backward is not supported)"
        )

    torch.library.register_autograd(qualified(name), refuse, setup_context=setup)


def _final_state(
    q: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: str,
) -> Tensor:
    words = options.split()
    if "final" not in words:
        return nothing(q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    widths = (q.shape[3], v.shape[3])
    dtype = wide(q.dtype) if initial_state is None else initial_state.dtype
    return q.new_empty(
        (sequences, v.shape[2], *(widths[::-1] if "layout=vk" in words else widths)), dtype=dtype
    )


def _saved(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    options: str,
) -> Tensor:
    said = said_in(options)
    save = {"states": 1, "all": 2}.get(said.get("save", ""), 0)
    if save == 0:
        return nothing(q, torch.uint8)
    batch, tokens, heads, keys = q.shape
    packed = cu_seqlens is not None
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = (batch, tokens, heads, keys, v.shape[2], v.shape[3], sequences)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        # About the square root of a symbolic length: a size of its own is simpler to carry.
        return q.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)
    chunk, impl = int(said.get("chunk", 64)), said.get("impl")
    found = saved_bytes(q.device.type, q.dtype, sizes, packed, chunk, save, impl)
    return q.new_empty((found,), dtype=torch.uint8)


@register_fake("forward")
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _final_state(q, v, initial_state, cu_seqlens, options)


@register_fake("forward_save")
def _forward_save_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    ckpt_cu: Tensor | None,
    ckpt_tokens: Tensor | None,
    ckpt_slots: Tensor | None,
    ckpt_states: Tensor | None,
    recurrent_from: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, options),
        nothing(q) if ckpt_states is None else torch.clone(ckpt_states),
        _saved(q, v, cu_seqlens, options),
    )


@register_fake("forward_")
def _forward_in_place_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    read_index: Tensor | None,
    write_index: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    ckpt_cu: Tensor | None,
    ckpt_tokens: Tensor | None,
    ckpt_slots: Tensor | None,
    ckpt_states: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, options),
    )


@register_fake("decode")
def _decode_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    gv: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, options),
    )


def _out_fakes(
    q: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor]:
    """o where the caller gives no memory for it, and the final state."""
    o = v.new_empty(v.shape) if out is None else nothing(q)
    return o, _final_state(q, v, initial_state, cu_seqlens, options)


@register_fake("forward_out_")
def _forward_out_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    read_index: Tensor | None,
    write_index: Tensor | None,
    write_pool: Tensor | None,
    has_initial_state: Tensor | None,
    accepted: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    ckpt_cu: Tensor | None,
    ckpt_tokens: Tensor | None,
    ckpt_slots: Tensor | None,
    ckpt_states: Tensor | None,
    recurrent_from: Tensor | None,
    out: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    return _out_fakes(q, v, initial_state, cu_seqlens, out, options)


@register_fake("decode_out_")
def _decode_out_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    gv: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    read_index: Tensor | None,
    write_index: Tensor | None,
    write_pool: Tensor | None,
    has_initial_state: Tensor | None,
    accepted: Tensor | None,
    parents: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    out: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    return _out_fakes(q, v, initial_state, cu_seqlens, out, options)


@register_fake("decode_record_")
def _decode_record_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_pool: Tensor,
    read_index: Tensor | None,
    has_initial_state: Tensor | None,
    accepted: Tensor | None,
    parents: Tensor | None,
    record: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    out: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> Tensor:
    return v.new_empty(v.shape) if out is None else nothing(q)


@register_fake("decode_")
def _decode_in_place_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
    return v.new_empty(v.shape)


@register_fake("backward")
def _backward_fake(
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    gv: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    saved: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
    want: int = 511,
) -> tuple[Tensor, ...]:
    inputs = (q, k, v, beta, g, gv, A_log, dt_bias, initial_state)
    dtypes = [None if x is None else x.dtype for x in inputs[:-1]] + [wide(q.dtype)]
    return tuple(
        nothing(q) if x is None or not want >> i & 1 else x.new_empty(x.shape, dtype=dtype)
        for i, (x, dtype) in enumerate(zip(inputs, dtypes, strict=True))
    )


# The tensors that gradients need, first arguments of forward and of decode.
_DECODE_TENSORS = (*_GRADIENTS, "cu_seqlens", "cu_seqlens_cpu")
_FORWARD_TENSORS = tuple(name for name in _DECODE_TENSORS if name != "gv")


def _keep(ctx: Any, names: tuple[str, ...], inputs: tuple[Any, ...], saved: Tensor | None) -> bool:
    """Keeps what backward needs; returns whether the final state is an output."""
    scale, lower_bound, options = inputs[-3:]
    words = options.split()
    ctx.set_materialize_grads(False)
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*inputs[: len(names)], saved)
    # What forward keeps and returns, and in which form, is no business of backward's.
    mine = " ".join(w for w in words if w != "final" and not w.startswith(("save=", "form=")))
    ctx.options = (scale, lower_bound, mine)
    has_final_state = "final" in words
    ctx.has_final_state = has_final_state
    return has_final_state


def below_autograd(op: Any) -> Any:
    """An operator without what autograd would do around it."""

    def run(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    run.operator = op  # type: ignore[attr-defined]
    return run


def _gradients(
    ctx: Any,
    names: tuple[str, ...],
    d_o: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    tensors: dict[str, Any] = {"gv": None, **dict(zip(names, inputs, strict=True))}
    needs = dict(zip(names, ctx.needs_input_grad, strict=False))
    if not ctx.has_final_state:
        d_final_state = None
    elif d_final_state is not None:
        d_final_state = d_final_state.to(wide(tensors["q"].dtype))
    # With create_graph the operator's own gradient, an error, must stay in the way.
    found = call(
        BACKWARD if torch.is_grad_enabled() else below_autograd(BACKWARD),
        d_o,
        d_final_state,
        *(tensors[name] for name in _DECODE_TENSORS),
        saved,
        *ctx.options,
        wanted([needs.get(name, False) for name in _GRADIENTS]),
    )
    gradients = dict(zip(_GRADIENTS, found, strict=True))
    if needs["initial_state"]:
        state_dtype = tensors["initial_state"].dtype
        gradients["initial_state"] = gradients["initial_state"].to(state_dtype)
    result = [gradients[name] if needs[name] else None for name in names if name in gradients]
    return (*result, *[None] * (ctx.num_inputs - len(result)))


def _save_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, final_state, ckpt_states, saved = output
    has_final_state = _keep(ctx, _FORWARD_TENSORS, inputs, saved if "save=" in inputs[-1] else None)
    ctx.mark_non_differentiable(ckpt_states, saved, *(() if has_final_state else (final_state,)))


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if not _keep(ctx, _FORWARD_TENSORS, inputs, None):
        ctx.mark_non_differentiable(output[1])


def _forward_backward(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, _FORWARD_TENSORS, d_o, d_final_state)


def _decode_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if not _keep(ctx, _DECODE_TENSORS, inputs, None):
        ctx.mark_non_differentiable(output[1])


def _decode_backward(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, _DECODE_TENSORS, d_o, d_final_state)


for _name, _backward, _setup in (
    ("forward", _forward_backward, _forward_setup),
    ("forward_save", _forward_backward, _save_setup),
    ("decode", _decode_backward, _decode_setup),
):
    torch.library.register_autograd(qualified(_name), _backward, setup_context=_setup)
refuse_gradient("backward")
for _name in (
    *("forward", "forward_save", "forward_", "forward_out_"),
    *("decode", "decode_", "decode_out_", "decode_record_", "backward"),
):
    refuse_vmap(_name)


def short_way(op: Any, setup: Any, gradient: Any) -> Any:
    """An operator with its gradient, without what torch.library adds: 10 us for every argument."""
    run = below_autograd(op)

    class ShortWay(torch.autograd.Function):
        operator = op

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(gradient)

    return ShortWay.apply


_forward_save = short_way(FORWARD_SAVE, _save_setup, _forward_backward)
_decode = short_way(DECODE, _decode_setup, _decode_backward)


def differentiable(op: Any) -> Any:
    """The shortest way to the output and gradients of FORWARD_SAVE or DECODE.

    Compilers know the operator, and where it is refused its name is needed; the plain case takes
    the function.
    """
    if is_transformed():
        return op
    return _forward_save if op is FORWARD_SAVE else _decode
