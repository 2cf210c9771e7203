"""Fake implementations and gradients of forward, backward and decode."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._library import call, saved_bytes

FORWARD = torch.ops.deltic.forward.default
FORWARD_ = torch.ops.deltic.forward_.default
BACKWARD = torch.ops.deltic.backward.default
DECODE = torch.ops.deltic.decode.default
DECODE_ = torch.ops.deltic.decode_.default

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
        raise NotImplementedError(
            f"{name}: vmap: expected a batch in the first dimension (or packed sequences), got a "
            "call under torch.vmap"
        )

    torch.library.register_vmap(f"deltic::{name}", refuse)


def refuse_gradient(name: str) -> None:
    """Registers that an operator that is itself a gradient has none."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: create_graph: expected first gradients only, got a gradient of a gradient "
            "(double backward is not supported)"
        )

    torch.library.register_autograd(f"deltic::{name}", refuse, setup_context=setup)


def _final_state(
    q: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_layout: int,
    asked: bool,
) -> Tensor:
    if not asked:
        return nothing(q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    widths = (q.shape[3], v.shape[3])
    dtype = wide(q.dtype) if initial_state is None else initial_state.dtype
    return q.new_empty(
        (sequences, v.shape[2], *(widths[::-1] if state_layout == 1 else widths)), dtype=dtype
    )


def _saved(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    save: int,
    impl: str | None,
) -> Tensor:
    if save == 0:
        return nothing(q, torch.uint8)
    batch, tokens, heads, keys = q.shape
    packed = cu_seqlens is not None
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = (batch, tokens, heads, keys, v.shape[2], v.shape[3], sequences)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        # About the square root of a symbolic length: a size of its own is simpler to carry.
        return q.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)
    found = saved_bytes(q.device.type, q.dtype, sizes, packed, chunk_size, save, impl)
    return q.new_empty((found,), dtype=torch.uint8)


@torch.library.register_fake("deltic::forward")
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
    ckpt_cu: Tensor | None,
    ckpt_tokens: Tensor | None,
    ckpt_slots: Tensor | None,
    ckpt_states: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    gate: int = 0,
    beta_form: int = 0,
    qk_l2norm: bool = False,
    state_layout: int = 0,
    split: int = 0,
    segment_length: int = 0,
    chunk_size: int = 64,
    impl: str | None = None,
    output_final_state: bool = False,
    save: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, state_layout, output_final_state),
        nothing(q) if ckpt_states is None else torch.clone(ckpt_states),
        _saved(q, v, cu_seqlens, chunk_size, save, impl),
    )


@torch.library.register_fake("deltic::forward_")
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
    gate: int = 0,
    beta_form: int = 0,
    qk_l2norm: bool = False,
    state_layout: int = 0,
    split: int = 0,
    segment_length: int = 0,
    chunk_size: int = 64,
    impl: str | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, state_layout, output_final_state),
    )


@torch.library.register_fake("deltic::decode")
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
    gate: int = 0,
    beta_form: int = 0,
    qk_l2norm: bool = False,
    state_layout: int = 0,
    impl: str | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    return (
        v.new_empty(v.shape),
        _final_state(q, v, initial_state, cu_seqlens, state_layout, output_final_state),
    )


@torch.library.register_fake("deltic::decode_")
def _decode_in_place_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.register_fake("deltic::backward")
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
    gate: int = 0,
    beta_form: int = 0,
    qk_l2norm: bool = False,
    state_layout: int = 0,
    split: int = 0,
    segment_length: int = 0,
    chunk_size: int = 64,
    impl: str | None = None,
    want: int = 511,
) -> tuple[Tensor, ...]:
    inputs = (q, k, v, beta, g, gv, A_log, dt_bias, initial_state)
    dtypes = [None if x is None else x.dtype for x in inputs[:-1]] + [wide(q.dtype)]
    return tuple(
        nothing(q) if x is None or not want >> i & 1 else x.new_empty(x.shape, dtype=dtype)
        for i, (x, dtype) in enumerate(zip(inputs, dtypes, strict=True))
    )


def _setup(
    ctx: Any, tensors: dict[str, Tensor | None], options: tuple[Any, ...], saved: Any
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors.values(), saved)
    ctx.names = tuple(tensors)
    ctx.options = options


def _gradients(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None, names: tuple[str, ...]
) -> list[Tensor | None]:
    """The gradients of the inputs called `names`, the operator's first arguments."""
    *inputs, saved = ctx.saved_tensors
    tensors: dict[str, Tensor | None] = {"gv": None, **dict(zip(ctx.names, inputs, strict=True))}
    needs = {name: ctx.needs_input_grad[i] for i, name in enumerate(names)}
    want = wanted([needs.get(name, False) for name in _GRADIENTS])
    q = tensors["q"]
    assert q is not None
    if d_final_state is not None:
        d_final_state = d_final_state.to(wide(q.dtype))
    found = dict(
        zip(
            _GRADIENTS,
            call(
                BACKWARD,
                d_o,
                d_final_state,
                *(tensors[name] for name in (*_GRADIENTS, "cu_seqlens", "cu_seqlens_cpu")),
                saved,
                *ctx.options,
                want,
            ),
            strict=True,
        )
    )
    state = tensors["initial_state"]
    if state is not None:
        found["initial_state"] = found["initial_state"].to(state.dtype)
    return [found[name] if needs[name] and name in found else None for name in names]


_FORWARD_TENSORS = (
    *(name for name in _GRADIENTS if name != "gv"),
    "cu_seqlens",
    "cu_seqlens_cpu",
)
_FORWARD_INPUTS = 26
_DECODE_TENSORS = (*_GRADIENTS, "cu_seqlens", "cu_seqlens_cpu")
_DECODE_INPUTS = 19


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, final_state, ckpt_states, saved = output
    *options, output_final_state, save = inputs[14:]
    tensors = dict(zip(_FORWARD_TENSORS, inputs[:10], strict=True))
    _setup(ctx, tensors, tuple(options), saved if save else None)
    ctx.has_final_state = output_final_state
    ctx.mark_non_differentiable(
        ckpt_states, saved, *(() if output_final_state else (final_state,))
    )


def _forward_backward(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if not ctx.has_final_state:
        d_final_state = None
    gradients = _gradients(ctx, d_o, d_final_state, _FORWARD_TENSORS)
    return (*gradients, *[None] * (_FORWARD_INPUTS - len(gradients)))


def _decode_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scale, lower_bound, gate, beta_form, qk_l2norm, state_layout, impl, output_final_state = inputs[
        11:
    ]
    forms = (scale, lower_bound, gate, beta_form, qk_l2norm, state_layout)
    tensors = dict(zip(_DECODE_TENSORS, inputs[:11], strict=True))
    _setup(ctx, tensors, (*forms, 0, 0, 64, impl), None)
    ctx.has_final_state = output_final_state
    if not output_final_state:
        ctx.mark_non_differentiable(output[1])


def _decode_backward(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.has_final_state:
        d_final_state = None
    gradients = _gradients(ctx, d_o, d_final_state, _DECODE_TENSORS)
    return (*gradients, *[None] * (_DECODE_INPUTS - len(gradients)))


torch.library.register_autograd(
    "deltic::forward", _forward_backward, setup_context=_forward_setup
)
torch.library.register_autograd("deltic::decode", _decode_backward, setup_context=_decode_setup)
refuse_gradient("backward")
for _name in ("forward", "forward_", "decode", "decode_", "backward"):
    refuse_vmap(_name)
