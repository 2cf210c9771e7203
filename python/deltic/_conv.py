"""The causal depthwise convolution in front of the delta rule, with its gradient."""

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ._fakes import register_fake
from ._library import LIBRARY, OPS, call, is_transformed, qualified
from ._native import (
    Checkpoints,
    autocast,
    checkpoint_tensors,
    flag_word,
    name_word,
    needs_grad,
    null_word,
    refuse_final_state,
)
from ._sequence_ops import (
    below_autograd,
    nothing,
    refuse_gradient,
    refuse_vmap,
    short_way,
    wanted,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = Literal["silu"] | None
MOST_TAPS = 8


_CUDA = 1  # the library's number for it
_GPUS: dict[int, bool] = {}


def _has_kernels(index: int) -> bool:
    if index not in _GPUS:
        _GPUS[index] = bool(LIBRARY.deltic_torch_runs_on(_CUDA, index))
    return _GPUS[index]


# What torch.compiler.assume_constant_result does: a compiler asks once. The decorator itself would
# load the compiler with the package, more than a second.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_kernels(x: Tensor) -> bool:
    """Whether the operators around the delta rule run where a tensor lies."""
    if x.device.type == "cuda":
        index = x.device.index
        return bool(_has_kernels(torch.cuda.current_device() if index is None else index))
    return x.device.type == "cpu"


_CONV = OPS.conv.default
_CONV_ = OPS.conv_.default
_CONV_OUT_ = OPS.conv_out_.default  # with everything that servers have
_CONV_BACKWARD = OPS.conv_backward.default
ACTIVATION_WORDS: dict[str | None, str] = {None: "", "silu": " activation=silu"}


# ---- Fake implementations and gradients ---------------------------------------------------------


@register_fake("conv")
def _conv_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    if "final" not in options.split():
        return out, nothing(x)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        return out, x.new_empty((sequences, x.shape[2], max(weight.shape[-1] - 1, 1)))
    shape = (sequences, x.shape[2], initial_state.shape[2])
    return out, x.new_empty(shape, dtype=initial_state.dtype)


@register_fake("conv_out_")
def _conv_out_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    out: Tensor | None,
    options: str = "",
) -> tuple[Tensor, Tensor]:
    y, final_state = _conv_fake(x, weight, bias, initial_state, cu_seqlens, cu_seqlens_cpu, options)
    return y if out is None else nothing(x), final_state


@register_fake("conv_")
def _conv_in_place_fake(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("conv_backward")
def _conv_backward_fake(
    d_out: Tensor | None,
    d_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    options: str = "",
    want: int = 15,
) -> tuple[Tensor, ...]:
    return tuple(
        nothing(x) if tensor is None or not want >> i & 1 else tensor.new_empty(tensor.shape)
        for i, tensor in enumerate((x, weight, bias, initial_state))
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, options = inputs
    words = options.split()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.options = " ".join(word for word in words if word != "final")
    ctx.has_final_state = "final" in words
    if not ctx.has_final_state:
        ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, d_out: Tensor | None, d_final_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    # With create_graph the operator's own gradient, an error, must stay in the way.
    found = call(
        _CONV_BACKWARD if torch.is_grad_enabled() else below_autograd(_CONV_BACKWARD),
        d_out,
        d_final_state if ctx.has_final_state else None,
        *ctx.saved_tensors,
        ctx.options,
        wanted(needs),
    )
    gradients = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    return (*gradients, None, None, None)


torch.library.register_autograd(qualified("conv"), _backward, setup_context=_setup)
refuse_gradient("conv_backward")
for _name in ("conv", "conv_", "conv_out_", "conv_backward"):
    refuse_vmap(_name)


_conv = short_way(_CONV, _setup, _backward)


# ---- Functions ----------------------------------------------------------------------------------


class _Options(TypedDict, total=False):
    """The keywords of causal_conv1d but for ``output_final_state``, which the result follows."""

    activation: Activation
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    state: Tensor | None
    state_index: Tensor | None
    checkpoints: Checkpoints | tuple[Tensor, Tensor, Tensor, Tensor] | None
    write_index: Tensor | None
    write_state: Tensor | None
    has_initial_state: Tensor | None
    null_slot: int | None
    out: Tensor | None
    impl: str | None


def _words(function: str, activation: str | None, impl: str | None) -> str:
    try:
        words = f"as={function}" + ACTIVATION_WORDS[activation]
    except (KeyError, TypeError):
        raise ValueError(
            f"{function}: activation: expected None or 'silu', got {activation!r}"
        ) from None
    return words if impl is None else words + name_word(function, impl)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    output_final_state: Literal[True],
    **options: "Unpack[_Options]",
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    output_final_state: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> tuple[Tensor, None]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    output_final_state: bool,
    **options: "Unpack[_Options]",
) -> tuple[Tensor, Tensor | None]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    state: Tensor | None = None,
    state_index: Tensor | None = None,
    write_index: Tensor | None = None,
    write_state: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A causal depthwise convolution of a few taps: the short convolution of GDN and KDA layers.

    Per sequence and channel d, with W taps::

        y_t[d] = activation(bias[d] + sum_j weight[d, j] * x_{t-W+1+j}[d])

    Args:
        x: ``[B, T, D]``, fp32, bf16 or fp16, in the tokens' order: what a model carries
            as ``[B, D, T]`` is copied after its transpose.
        weight: ``[D, W]`` or, as in ``torch.nn.Conv1d``, ``[D, 1, W]``; any float dtype and
            strides; W up to 8.
        bias: ``[D]``, any float dtype.
        activation: None or ``"silu"``.
        initial_state: ``[N, D, S]``, x's dtype or fp32: the last S inputs before this call, most
            recent last, S at least W - 1; absent means 0.
        output_final_state: returns the last S inputs after this call: as ``initial_state``, else
            W - 1 of them in x's dtype.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of packed sequences, with B = 1. Sequences do
            not see each other; rows past the last offset are padding: y is 0 there.
        cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU, for tensors on a GPU.
        checkpoints: as :class:`Checkpoints` of :func:`delta_rule`, with states ``[slots, D, S]`` in
            x's dtype or fp32: the last S inputs after so many tokens.
        state, state_index, write_index, write_state, has_initial_state, null_slot, out: as in
            :func:`causal_conv1d_update`; ``state`` takes the place of initial and final state. Not
            differentiable.
        impl: the name of an implementation, by default the best that takes the call. float64 runs
            in the oracle only, ``"reference"``.

    Returns:
        ``y [B, T, D]`` in x's dtype, and the final state or None. Arithmetic is fp32. Everything is
        differentiable.

    Under autocast x is cast to its dtype, weight and bias are not.

    >>> import torch, deltic
    >>> x, weight = torch.randn(2, 100, 64), torch.randn(64, 4)
    >>> y, state = deltic.causal_conv1d(x, weight, activation="silu", output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 100, 64]), torch.Size([2, 64, 3]))
    >>> bool((state[:, :, 2] == x[:, 99]).all())
    True
    """
    x = autocast(x)
    words = _words("causal_conv1d", activation, impl)
    words += flag_word("causal_conv1d", "output_final_state", " final", output_final_state)
    if output_final_state and state is not None:
        refuse_final_state("causal_conv1d", "state")
    tensors = (x, weight, bias, initial_state)
    pools = (state, state_index, write_index, write_state, has_initial_state)
    ckpt = () if checkpoints is None else checkpoint_tensors("causal_conv1d", checkpoints)
    if out is not None or null_slot is not None or any(t is not None for t in (*pools, *ckpt)):
        y, final_state = _in_place(
            "causal_conv1d",
            tensors,
            (*pools, None),
            (cu_seqlens, cu_seqlens_cpu),
            out,
            words + null_word("causal_conv1d", null_slot),
            ckpt or (None, None, None, None),
        )
        return y, final_state if output_final_state else None
    plain = needs_grad(tensors) and not is_transformed()
    y, final_state = call(_conv if plain else _CONV, *tensors, cu_seqlens, cu_seqlens_cpu, words)
    return y, final_state if output_final_state else None


def _in_place(
    function: str,
    tensors: tuple[Tensor | None, ...],
    pools: tuple[Tensor | None, ...],
    sequences: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
    words: str,
    ckpt: tuple[Tensor | None, ...] = (None, None, None, None),
) -> tuple[Tensor, Tensor]:
    """A call with what servers have, which has no gradient."""
    if needs_grad((*tensors, *pools[:1], *pools[3:4], out)):
        name = "state" if pools[0] is not None else "out" if out is not None else "null_slot"
        if name == "null_slot" and pools[4] is not None:
            name = "has_initial_state"
        raise ValueError(
            f"{function}: {name}: expected no gradients to be asked for (a state in place is not "
            "differentiable: use torch.no_grad(), or causal_conv1d), got a tensor that needs one"
            if name == "state"
            else f"{function}: {name}: expected none where gradients are asked for (use "
            "torch.no_grad()), got one"
        )
    y, final_state = call(_CONV_OUT_, *tensors, *pools, *sequences, *ckpt, out, words)
    return y if out is None else out, final_state


def _check_states(x: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises where there are more states than sequences, and no list says whose they are.

    The library takes such a pool, sequence n with slot n; of a step it is a batch's mistake. What
    is no tensor, and too few states, the operator refuses.
    """
    rows = x if cu_seqlens is None else cu_seqlens
    if not isinstance(rows, Tensor) or not isinstance(state, Tensor):
        return
    if rows.dim() == 0 or state.dim() != 3:
        return
    sequences = rows.shape[0] - (cu_seqlens is not None)
    if state.shape[0] > sequences:
        raise ValueError(
            f"causal_conv1d_update: state: expected a state for each of the {sequences} sequences "
            f"(a pool of more comes with state_index), got shape {list(state.shape)}"
        )


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    write_index: Tensor | None = None,
    write_state: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The same for one or a few new tokens per sequence, the states updated in place.

    Args:
        x: ``[B, D]``, one token per sequence, or ``[B, T, D]``.
        state: ``[B, D, S]``, x's dtype or fp32: the last S inputs, most recent last; S at least
            W - 1. With ``state_index`` a pool ``[slots, D, S]``.
        weight, bias, activation, impl: as in :func:`causal_conv1d`.
        state_index: ``[B]`` int32 or int64, the slot of each sequence; -1: the sequence is skipped
            and its y is 0.
        cu_seqlens: as in :func:`causal_conv1d`, with x ``[1, T, D]``.
        write_index: ``[B]``, the slot that is written where it is another one; -1: none.
        write_state: a second pool that is written instead of ``state``.
        has_initial_state: ``[B]`` bool: where False the sequence starts from zeros.
        accepted: ``[B]`` int32 or int64: of the tokens of the last call, which were drafted, so
            many count. A state is then a window of S = W - 1 + drafts inputs: those before this
            call's tokens begin at place ``accepted - 1``, and what is left behind is W - 2 of them
            and the call's own, from place 0 on. What :func:`causal_conv1d` leaves in
            ``state[:, :, : W - 1]`` is read with ``accepted`` 1.
        null_slot: slots from -1 up to this one are none; by default -1.
        out: of x's shape and dtype, in which y is written and returned.

    Returns:
        y, of x's shape. Not differentiable: see :func:`causal_conv1d`.

    >>> import torch, deltic
    >>> x, weight, state = torch.randn(2, 5, 64), torch.randn(64, 4), torch.zeros(2, 64, 3)
    >>> steps = [deltic.causal_conv1d_update(x[:, t], state, weight) for t in range(5)]
    >>> torch.equal(torch.stack(steps, 1), deltic.causal_conv1d(x, weight)[0])
    True
    """
    x = autocast(x)
    if needs_grad((x, weight, bias, state)):
        raise ValueError(
            "causal_conv1d_update: state: expected no gradients to be asked for (a state in place "
            "is not differentiable: use torch.no_grad(), or causal_conv1d), got a tensor that "
            "needs one"
        )
    if state_index is None and write_index is None:
        _check_states(x, state, cu_seqlens)
    words = _words("causal_conv1d_update", activation, impl)
    servers = (write_state, has_initial_state, accepted)
    if out is not None or null_slot is not None or any(t is not None for t in servers):
        y, _ = _in_place(
            "causal_conv1d_update",
            (x, weight, bias, None),
            (state, state_index, write_index, *servers),
            (cu_seqlens, None),
            out,
            words + null_word("causal_conv1d_update", null_slot),
        )
        return y
    args = (x, weight, bias, state, state_index, write_index, cu_seqlens, None, words)
    result: Tensor = call(_CONV_, *args)
    return result
