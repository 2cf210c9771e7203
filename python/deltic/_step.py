"""What a layer does in decode between its projections, in one call."""

from typing import Any

from torch import Tensor

from ._conv import ACTIVATION_WORDS, Activation
from ._fakes import register_fake
from ._library import OPS, call
from ._native import (
    BetaForm,
    Gate,
    StateLayout,
    autocast,
    check_numbers,
    flag_word,
    needs_grad,
    null_word,
    option_words,
    seed_word,
)
from ._norm import GateActivation, check_eps
from ._sequence_ops import nothing, refuse_vmap

_STEP_ = OPS.step_.default
_NORMS = {None: " norm=none", "silu": " norm=silu", "sigmoid": " norm=sigmoid"}


@register_fake("step_")
def _step_fake(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    conv_index: Tensor | None,
    conv_write_index: Tensor | None,
    conv_write_state: Tensor | None,
    beta: Tensor | None,
    g: Tensor | None,
    gv: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_pool: Tensor,
    read_index: Tensor | None,
    write_index: Tensor | None,
    write_pool: Tensor | None,
    has_initial_state: Tensor | None,
    accepted: Tensor | None,
    parents: Tensor | None,
    positions: Tensor | None,
    record: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    z: Tensor | None,
    norm_weight: Tensor | None,
    out: Tensor | None,
    scale: float | None = None,
    lower_bound: float | None = None,
    eps: float | None = None,
    options: str = "",
) -> Tensor:
    if out is not None:
        return nothing(x)
    width = state_pool.shape[2 if "layout=vk" in options.split() else 3]
    return x.new_empty((*x.shape[:2], state_pool.shape[1], width))


refuse_vmap("step_")


def _word(argument: str, value: Any, words: dict[str | None, str]) -> str:
    try:
        return words[value]
    except (KeyError, TypeError):
        names = [repr(name) for name in words]
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise ValueError(f"step: {argument}: expected {expected}, got {value!r}") from None


def _conv_lists(
    read_index: Tensor | None,
    write_index: Tensor | None,
    write_pool: Tensor | None,
    conv_index: Tensor | None,
    conv_write_index: Tensor | None,
    conv_write_state: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The convolution's lists of slots: by default those of the states, where they are lists."""
    if conv_index is not None or conv_write_index is not None:
        return conv_index, conv_write_index
    for name, given in (("read_index", read_index), ("write_index", write_index)):
        if isinstance(given, Tensor) and given.dim() == 2:
            raise ValueError(
                f"step: conv_index: expected a tensor [N] where {name} is a table of slots, "
                "got none"
            )
    if write_pool is not None and conv_write_state is None:
        raise ValueError(
            "step: conv_write_state: expected a tensor with write_pool (or conv_index, the slots "
            "of conv_state), got none"
        )
    return read_index, write_index


def step(
    x: Tensor,
    *,
    conv_weight: Tensor,
    conv_state: Tensor,
    conv_bias: Tensor | None = None,
    activation: Activation = "silu",
    conv_index: Tensor | None = None,
    conv_write_index: Tensor | None = None,
    conv_write_state: Tensor | None = None,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    state_pool: Tensor,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    write_pool: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    parents: Tensor | None = None,
    record: Tensor | None = None,
    null_slot: int | None = None,
    seed: int | None = None,
    positions: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_form: BetaForm = "value",
    qk_l2norm: bool = False,
    state_layout: StateLayout = "kv",
    norm: bool = True,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_activation: GateActivation = "silu",
    eps: float = 1e-5,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """:func:`causal_conv1d_update`, :func:`decode` and :func:`rms_norm` in one call.

    What a GDN or KDA layer does in decode between its projections, for one or a few tokens per
    sequence: the convolution of rows that hold q, k and v side by side, the delta rule on the
    states of a pool, and the gated norm of every value head. The results - rows, states, windows -
    have the bits of the three calls.

    Args:
        x: ``[B, T, D]``, fp32, bf16 or fp16, with ``D = 2 * H * K + HV * V``: H rows of K numbers
            q, H of k, HV of V numbers v. K, V and HV are those of ``state_pool``.
        conv_weight, conv_bias, activation: of the convolution, as in :func:`causal_conv1d`.
        conv_state: ``[slots, D, S]``, as in :func:`causal_conv1d_update`, in and out.
        conv_index, conv_write_index: ``[N]``, the slots of ``conv_state``; by default those of
            ``read_index`` and ``write_index``, where these are lists. Where one of the two is
            given, it alone serves for both.
        conv_write_state: a second pool that is written instead of ``conv_state``.
        beta, g, gv, state_pool, read_index, write_index, write_pool, parents, record, seed,
            positions, scale, gate, A_log, dt_bias, lower_bound, beta_form, qk_l2norm, state_layout:
            as in :func:`decode`; no ``parents`` with more than one tap, whose windows are chains.
        has_initial_state, accepted, null_slot: of both pools.
        cu_seqlens, cu_seqlens_cpu: as in :func:`delta_rule`.
        norm: False leaves the norm out: the result is o.
        z: ``[B, T, HV, V]``, the gate of the norm.
        norm_weight: ``[V]``, of the norm.
        norm_activation: of z: ``"silu"``, ``"sigmoid"`` or None, z itself.
        eps: of the norm.
        out: ``[B, T, HV, V]`` in which the result is written and returned: with a norm of any of
            the three dtypes, else of x's.
        impl: the name of an implementation, by default the best that takes the call.

    Returns:
        ``[B, T, HV, V]`` in x's dtype. Not differentiable: gradients are those of the three calls.

    Under autocast x is cast to its dtype.

    >>> import torch, deltic
    >>> x, g = torch.randn(3, 1, 2 * 64 + 2 * 32), -torch.rand(3, 1, 2)
    >>> states, windows = torch.zeros(8, 2, 32, 32), torch.zeros(8, 192, 3)
    >>> y = deltic.step(
    ...     x, conv_weight=torch.randn(192, 4), conv_state=windows, g=g, qk_l2norm=True,
    ...     state_pool=states, read_index=torch.tensor([5, 0, 2]),
    ... )
    >>> y.shape, [slot for slot in range(8) if states[slot].any()]
    (torch.Size([3, 1, 2, 32]), [0, 2, 5])
    """
    x = autocast(x)
    tensors = (x, conv_weight, conv_bias, conv_state, conv_write_state, beta, g, gv, A_log, dt_bias)
    if needs_grad((*tensors, state_pool, write_pool, record, z, norm_weight, out)):
        raise ValueError(
            "step: x: expected no gradients to be asked for (states in place are not "
            "differentiable: use torch.no_grad(), or causal_conv1d, recurrent and rms_norm), got a "
            "tensor that needs one"
        )
    words = option_words("step", gate, beta_form, qk_l2norm, state_layout, False, impl)
    words += _word("activation", activation, ACTIVATION_WORDS)
    flag_word("step", "norm", "", norm)  # no text such as "no"
    if norm:
        word = _word("norm_activation", norm_activation, _NORMS)
        words += word if z is not None else _NORMS[None]
        check_eps("step", eps)
    else:
        for name, given in (("z", z), ("norm_weight", norm_weight)):
            if given is not None:
                raise ValueError(f"step: {name}: expected none without a norm, got a tensor")
    words += null_word("step", null_slot) + seed_word("step", seed)
    check_numbers("step", scale, lower_bound)
    lists = _conv_lists(
        read_index, write_index, write_pool, conv_index, conv_write_index, conv_write_state
    )
    y: Tensor = call(
        _STEP_,
        *(x, conv_weight, conv_bias, conv_state, *lists, conv_write_state),
        *(beta, g, gv, A_log, dt_bias),
        *(state_pool, read_index, write_index, write_pool, has_initial_state, accepted),
        *(parents, positions, record, cu_seqlens, cu_seqlens_cpu, z, norm_weight, out),
        scale,
        lower_bound,
        float(eps) if norm else None,
        words,
    )
    return y if out is None else out
