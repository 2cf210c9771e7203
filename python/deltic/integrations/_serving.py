"""What the switches for inference servers share: packed rows, gates, when a call is not ours."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._conv import MOST_TAPS, causal_conv1d, causal_conv1d_update, has_kernels
from ._modules import ACTIVATIONS
from ._patch import named, say_once

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_KEY_WIDTH = 256


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def find_module(name: str) -> tuple[Any | None, str]:
    """A module, or none and the sentence why not."""
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, f"not in this version: {error}"


def other_arguments(function: Callable[..., Any], expected: Iterable[str]) -> str | None:
    """What a function lacks of the arguments it is called with here, or has beyond them."""
    function = inspect.unwrap(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [p.name for p in parameters if p.kind not in kinds]
    known = list(expected)
    missing = [name for name in known if name not in names]
    if missing:
        return f"expected an argument {missing[0]!r}, got ({', '.join(names)})"
    needed = [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in kinds and p.name not in known
    ]
    return f"it has an argument {needed[0]!r} that nobody here knows" if needed else None


def head_rows(x: Tensor, heads: int, width: int) -> Tensor:
    """``[..., heads * width]`` as ``[..., heads, width]``: a view."""
    rows: Tensor = x.unflatten(-1, (heads, width))
    return rows


def split_rows(
    rows: Tensor, heads: tuple[int, int], widths: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of packed rows ``[..., 2 H K + HV V]``."""
    (H, HV), (K, V) = heads, widths
    q, k, v = rows.split([H * K, H * K, HV * V], dim=-1)
    return head_rows(q, H, K), head_rows(k, H, K), head_rows(v, HV, V)


def key_heads(rows: Tensor, state: Tensor) -> int:
    """H of packed rows ``[..., 2 H K + HV V]`` beside a state ``[..., HV, V, K]``."""
    HV, V, K = state.shape[-3:]
    return int(rows.shape[-1] - HV * V) // (2 * K)


def gate_options(
    A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> dict[str, Any]:
    """The gate of raw rows: softplus, or bounded from below."""
    options: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "gate": "softplus"}
    if lower_bound is not None:
        options |= {"gate": "bounded", "lower_bound": lower_bound}
    return options


def refusal(rows: Tensor, state: Tensor | None, value_state: bool = True) -> str | None:
    """Why a call on these tensors is left to the server; without looking at their values."""
    if not has_kernels(rows):
        return f"no operator for {rows.device} in this build"
    if rows.dtype not in DTYPES:
        return f"{rows.dtype} rows"
    if state is None:
        return None
    if state.dtype not in DTYPES:
        return f"a state of {state.dtype}"
    if value_state and state.shape[-1] > _MAX_KEY_WIDTH:
        return f"keys wider than {_MAX_KEY_WIDTH}"
    return None


def conv_refusal(x: Tensor, weight: Tensor, state: Tensor | None, activation: Any) -> str | None:
    """The same for a convolution."""
    reason = refusal(x, state, value_state=False)
    if reason is not None:
        return reason
    if weight.shape[-1] > MOST_TAPS:
        return f"a convolution of {weight.shape[-1]} taps"
    if activation not in (*ACTIVATIONS, True, False):
        return f"the activation {activation!r}"
    if state is not None and state.dtype not in (x.dtype, torch.float32):
        return f"windows of {state.dtype} for rows of {x.dtype}"
    return None


def activation_of(activation: Any) -> Any:
    """The name that deltic has for a convolution's activation."""
    return "silu" if activation in ("silu", "swish", True) else None


def with_fallback(
    ours: Callable[..., Any],
    why_not: Callable[..., str | None],
    knows: Iterable[str],
) -> Callable[[Any, str], Any]:
    """Makes a function's replacement: ours where it takes the call, else what was there before.

    Args:
        ours: takes the function's arguments by name.
        why_not: the same, and says why a call is the original's.
        knows: the names it takes. Another argument makes a call the original's if it says anything.
    """
    known = tuple(knows)

    def make(original: Any, name: str) -> Any:
        signature = inspect.signature(inspect.unwrap(original))

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = dict(bound.arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(parameter.name, {})
            mine = {key: value for key, value in given.items() if key in known}
            reason = None
            for key in given.keys() - set(known):
                if given[key] is not None and given[key] is not False:
                    reason = f"the argument {key!r}"
            if reason is None:
                reason = why_not(**mine)
            if reason is None:
                return ours(**mine)
            say_once(name, reason)
            return original(*args, **kwargs)

        return named(function, original, name)

    return make


# ---- Convolutions as vLLM and SGLang call them ---------------------------------------------------


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor,
    index: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    activation: Any,
    null_slot: int,
    checkpoints: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Packed rows ``[T, D]`` of prompts; windows ``[slots, D, S]``, W - 1 of them used."""
    window = state[:, :, : weight.shape[-1] - 1]
    y, _ = causal_conv1d(
        x.unsqueeze(0),
        weight,
        bias,
        activation=activation_of(activation),
        cu_seqlens=cu_seqlens,
        state=window,
        state_index=None if index is None else index[: cu_seqlens.shape[0] - 1],
        has_initial_state=has_initial_state,
        null_slot=null_slot,
        checkpoints=None if checkpoints is None else (*checkpoints, window),
    )
    return y.squeeze(0)


def conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor,
    index: Tensor | None,
    activation: Any,
    null_slot: int,
    out: Tensor | None = None,
) -> Tensor:
    """One token ``[B, D]`` per sequence."""
    return causal_conv1d_update(
        x,
        state[:, :, : weight.shape[-1] - 1],
        weight,
        bias,
        activation=activation_of(activation),
        state_index=index,
        null_slot=null_slot,
        out=out,
    )


def conv_drafts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor,
    index: Tensor,
    accepted: Tensor | None,
    cu_seqlens: Tensor,
    activation: Any,
    null_slot: int,
    out: Tensor | None = None,
) -> Tensor:
    """Drafted tokens ``[T, D]`` behind those that were accepted of the last call's."""
    count = cu_seqlens.shape[0] - 1
    window = state if accepted is not None else state[:, :, : weight.shape[-1] - 1]
    y = causal_conv1d_update(
        x.unsqueeze(0),
        window,
        weight,
        bias,
        activation=activation_of(activation),
        state_index=index[:count],
        accepted=None if accepted is None else accepted[:count],
        cu_seqlens=cu_seqlens,
        null_slot=null_slot,
        out=None if out is None else out.unsqueeze(0),
    )
    return y.squeeze(0)
