"""SGLang's linear attention, on deltic's operators, as one of its kernel backends.

    >>> from deltic.integrations import sglang
    >>> print(sglang.enable())      # doctest: +SKIP
    >>> sglang.disable()            # doctest: +SKIP

Where deltic is installed beside SGLang, :func:`register` does it in every process of the server
(entry point ``sglang.srt.plugins``; the environment variable ``SGLANG_PLUGINS`` chooses among
plugins), and ``--linear-attn-backend deltic`` (or ``--linear-attn-decode-backend``,
``--linear-attn-prefill-backend``, ``--linear-attn-verify-backend``) takes it. Whoever names another
backend gets that one, as before.

The kernels run on SGLang's pools as they are, whatever lies between their slots, with gates, norms
and the sigmoid of beta inside. What deltic does not take goes to SGLang's Triton kernels; the log
says why.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._patch import Report, Target, named
from ._plugin import Plugin
from ._serving import (
    conv_prefill,
    conv_refusal,
    conv_step,
    gate_options,
    other_arguments,
    with_fallback,
)
from ._sglang_kernel import GDN, KDA, Raw, kernel, kernel_class, settings

__all__ = ["NAME", "disable", "enable", "register"]

NAME = "deltic"
_log = logging.getLogger("sglang.deltic")


# ---- Dispatchers ---------------------------------------------------------------------------------

_PHASES = ("decode", "prefill", "verify")


def _chosen(backends: tuple[Any, Any, Any]) -> dict[str, bool]:
    """The phases that the server's arguments give to this backend.

    A name that SGLang does not know is ``CUSTOM`` to its dispatchers; whose it is only the
    arguments say. Verification follows decoding where nobody says otherwise.
    """
    custom = [getattr(backend, "value", None) == "custom" for backend in backends]
    group = getattr(settings("get_exec"), "mamba", None)
    base = getattr(group, "linear_attn_backend", None)
    said = [getattr(group, f"linear_attn_{phase}_backend", None) for phase in _PHASES]
    if group is None:  # nobody to ask
        names = [NAME if is_custom else None for is_custom in custom]
    else:
        names = [own or base for own in said]
    if said[2] is None:
        names[2] = names[0]
    return {phase: name == NAME for phase, name in zip(_PHASES, names, strict=True)}


def _make_dispatcher(module: Any, per_channel: bool) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        def __init__(
            self: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None
        ) -> None:
            backends = (decode_backend, prefill_backend, verify_backend)
            ours = _chosen(backends)
            if not any(ours.values()):
                original(self, *backends)
                return
            # What is ours is Triton's while the dispatcher is made: it refuses other names.
            triton = type(decode_backend)("triton")
            original(
                self, *(triton if ours[p] else b for p, b in zip(_PHASES, backends, strict=True))
            )
            made = kernel(per_channel)
            if ours["decode"]:
                self.decode_kernel = made
                self.supports_packed_decode = self.supports_packed_decode_safe_gate = True
            if ours["prefill"]:
                self.extend_kernel = made
            if ours["verify"]:
                self.verify_kernel = self.tree_verify_kernel = made
            phases = ", ".join(phase for phase in _PHASES if ours[phase])
            _log.info("%s: deltic for %s", "KDA" if per_channel else "GDN", phases)
            _plugin.switch.turn_on(_plugin.title(), _conv_target(module), {})

        return named(__init__, original, name)

    return make


def _conv_step_refusal(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    activation: Any = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    **_: Any,
) -> str | None:
    if x.dim() != 2:
        return f"rows of shape {tuple(x.shape)}"
    if conv_state_indices is None or pad_slot_id != -1:
        return "slots of another kind"
    return conv_refusal(x, weight, conv_state, activation)


@torch.no_grad()
def _conv_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    validate_data: bool = False,
) -> Tensor:
    return conv_step(
        x,
        weight,
        bias,
        state=conv_state,
        index=conv_state_indices,
        activation=activation,
        null_slot=-1,
    )


_CONV_ARGUMENTS = ("x", "conv_state", "weight", "bias", "activation", "conv_state_indices")


def _conv_target(module: Any) -> list[Target]:
    """The step of the convolution, where a dispatcher has this backend."""
    name = "causal_conv1d_update"
    found = vars(module).get(name)
    if found is None or _plugin.switch.held(module, name) is not None:
        return []
    if other_arguments(found, _CONV_ARGUMENTS) is not None:
        return []
    known = (*_CONV_ARGUMENTS, "pad_slot_id", "validate_data")
    put = with_fallback(_conv_step, _conv_step_refusal, known)(found, name)
    title = f"{module.__name__.rpartition('.')[2]}.{name}"
    return [Target(module, name, put, title, "deltic.causal_conv1d_update")]


# ---- The classes around the dispatchers ----------------------------------------------------------


def _has(forward_batch: Any) -> Tensor:
    """Which prompts continue a kept prefix: made once for all layers of a step."""
    lengths = forward_batch.extend_prefix_lens
    kept = getattr(forward_batch, "_deltic_has", None)
    if kept is None or kept[0] is not lengths:
        kept = (lengths, lengths > 0)
        forward_batch._deltic_has = kept
    has: Tensor = kept[1]
    return has


def _with_convolution(base: Any) -> Any:
    """A backend whose prompts go through deltic's convolution where its kernel is deltic's."""

    class Convolution(base):  # type: ignore[misc]
        def _is_deltic(self) -> bool:
            return isinstance(self.kernel_dispatcher.extend_kernel, kernel_class())

        @torch.no_grad()
        def _convolve_prefill(
            self,
            layer: Any,
            forward_batch: Any,
            mixed_qkv: Tensor,
            conv_states: Tensor,
            cache_indices: Tensor,
        ) -> Any:
            activation = getattr(layer, "activation", "silu")
            reason = conv_refusal(mixed_qkv, layer.conv_weights, conv_states, activation)
            if not self._is_deltic() or reason is not None:
                return super()._convolve_prefill(
                    layer, forward_batch, mixed_qkv, conv_states, cache_indices
                )
            return conv_prefill(
                mixed_qkv,
                layer.conv_weights,
                layer.bias,
                state=conv_states,
                index=cache_indices,
                has_initial_state=_has(forward_batch),
                cu_seqlens=self.forward_metadata.query_start_loc,
                activation=activation,
                null_slot=-1,
            )

    return Convolution


@cache
def _gdn_backend(base: Any) -> Any:
    """SGLang's backend for gates per head, without the kernels around a prompt's call."""
    convolution: Any = _with_convolution(base)

    class DelticGDNAttnBackend(convolution):  # type: ignore[misc]
        @property
        def requires_contiguous_prefill_state(self) -> bool:
            """Whether slots are gathered before a prompt and scattered after it."""
            return bool(base.requires_contiguous_prefill_state) and not self._is_deltic()

        def _prefill_gates(self, layer: Any, a: Tensor, b: Tensor) -> Any:
            if not self._is_deltic():
                return base._prefill_gates(layer, a, b)
            return Raw(a, gate_options(layer.A_log, layer.dt_bias)), b

        def _init_target_verify_qkv_routing(self, forward_batch: Any) -> None:
            super()._init_target_verify_qkv_routing(forward_batch)
            if not forward_batch.forward_mode.is_target_verify() and self._is_deltic():
                # Of prompts too: q, k and v are views of the packed rows.
                self._use_strided_target_verify_qkv = True

    return DelticGDNAttnBackend


@cache
def _kda_backend(base: Any) -> Any:
    """SGLang's backend for gates per channel."""
    convolution: Any = _with_convolution(base)

    class DelticKDAAttnBackend(convolution):  # type: ignore[misc]
        """Its kernels take raw gates and strided rows as they are."""

    return DelticKDAAttnBackend


# ---- What is replaced where ----------------------------------------------------------------------


class _Listed:
    """This backend's name among those that the server's arguments take."""

    def __init__(self, names: list[str]) -> None:
        self.__dict__["_names"] = names

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if NAME not in self.__dict__["_names"]:
            self.__dict__["_names"].append(NAME)

    def __delattr__(self, name: str) -> None:
        del self.__dict__[name]
        if NAME in self.__dict__["_names"]:
            self.__dict__["_names"].remove(NAME)


@cache
def _listed(choices: Any) -> Any:
    return _Listed(choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES)


_DISPATCHER = ("self", "decode_backend", "prefill_backend", "verify_backend")
_CONVOLVE = ("self", "layer", "forward_batch", "mixed_qkv", "conv_states", "cache_indices")


def _targets_of(module: Any, left: dict[str, str]) -> list[Target]:
    """Of a module: its dispatcher's making, and the backend's class."""
    dispatcher, backend, per_channel = _PLACES[module.__name__]
    targets = []
    owner = getattr(module, dispatcher, None)
    title = f"{dispatcher}.__init__"
    if owner is None or "__init__" not in vars(owner):
        left[title] = "not in this version"
        return []
    put = _plugin.switch.held(owner, "__init__")
    if put is None:
        reason = other_arguments(vars(owner)["__init__"], _DISPATCHER)
        if reason is not None:
            left[title] = reason
            return []
        put = _make_dispatcher(module, per_channel)(vars(owner)["__init__"], "__init__")
    targets.append(Target(owner, "__init__", put, title, "the backend 'deltic'"))
    held = _plugin.switch.held(module, backend)
    base = getattr(module, backend, None) if held is None else None
    if held is not None:
        targets.append(Target(module, backend, held, backend, "deltic", ("sglang",)))
    elif base is None:
        left[backend] = "not in this version"
    else:
        method = vars(base).get("_convolve_prefill")
        reason = "it has no _convolve_prefill" if method is None else None
        reason = reason if method is None else other_arguments(method, _CONVOLVE)
        if not per_channel and reason is None and not hasattr(base, "_prefill_gates"):
            reason = "it has no _prefill_gates"
        if reason is not None:
            left[backend] = reason
        else:
            make = _kda_backend if per_channel else _gdn_backend
            note = "a subclass that convolves with deltic"
            targets.append(Target(module, backend, make(base), backend, note, ("sglang",)))
    return targets


_PLACES = {
    GDN: ("GDNKernelDispatcher", "GDNAttnBackend", False),
    KDA: ("KDAKernelDispatcher", "KDAAttnBackend", True),
}


def _choice_target(left: dict[str, str]) -> list[Target]:
    title = "--linear-attn-backend"
    try:
        listed = _listed(importlib.import_module("sglang.srt.arg_groups.choices"))
        return [Target(listed, "listed", True, title, f"takes {NAME!r}")]
    except (ImportError, AttributeError) as error:
        left[title] = f"not in this version: {error}"
        return []


_plugin = Plugin(
    package="sglang",
    product="SGLang",
    oldest="0.5.23",
    parts="dispatchers",
    logger="sglang.deltic",
    modules=tuple(_PLACES),
    targets=_targets_of,
    always=_choice_target,
)


def enable() -> Report:
    """Makes ``deltic`` one of SGLang's backends for linear attention, in this process.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: SGLang is not installed, or a version without these dispatchers.
    """
    return _plugin.enable()


def disable() -> Report:
    """Puts back everything that :func:`enable` or :func:`register` replaced.

    Dispatchers that SGLang has made since keep their kernels.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    return _plugin.disable()


def register() -> None:
    """What SGLang calls in each of its processes: :func:`enable`, of modules as they are imported.

    An SGLang that is too old is left as it is, with a line in the log.
    """
    _plugin.register()
