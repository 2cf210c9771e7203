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
and the sigmoid of beta inside. What deltic does not take goes to SGLang's Triton kernels, and a line
in the log says why.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._native import decode, delta_rule
from . import _serving
from ._late import Watch
from ._patch import Report, Switch, Target, named, say_once
from ._serving import (
    conv_prefill,
    conv_refusal,
    conv_step,
    find_module,
    gate_options,
    key_heads,
    other_arguments,
    refusal,
    split_rows,
    with_fallback,
)

__all__ = ["NAME", "disable", "enable", "register"]

NAME = "deltic"
_switch = Switch()
_log = logging.getLogger("deltic.integrations")
_OLDEST = (0, 5, 23)
_CHUNK = 64  # tokens between two states that SGLang counts by
_MOST_TREE_TOKENS = 16
_LINEAR = "sglang.srt.layers.attention.linear"
_GDN, _KDA = f"{_LINEAR}.gdn_backend", f"{_LINEAR}.kda_backend"


class _Raw(NamedTuple):
    """Rows of a gate before softplus, with its parameters: what takes them computes it inside."""

    rows: Tensor
    options: dict[str, Any]


def _settings(name: str) -> Any:
    """A group of the server's settings; None where no server runs, as in tests."""
    try:
        return getattr(importlib.import_module("sglang.srt.runtime_context"), name)()
    except Exception:  # its own errors, by version, for settings nobody has made
        return None


def _split() -> str:
    """Whether long prompts may be divided by what else is in the batch."""
    group = getattr(_settings("get_exec"), "deterministic", None)
    return "off" if getattr(group, "enable_deterministic_inference", False) else "auto"


# ---- The kernels ----------------------------------------------------------------------------------


def _kernel_class() -> Any:
    """The class of the kernels: SGLang's base class is there when a server is."""
    base = importlib.import_module(f"{_LINEAR}.kernels.kernel_backend").LinearAttnKernelBase
    return _kernel_class_on(base)


@cache
def _kernel_class_on(base: Any) -> Any:
    class DelticKernel(base):  # type: ignore[misc]
        """The delta rule with a gate per head (GDN) or per channel (KDA).

        Args:
            per_channel: which of them; an ``extend`` of the latter returns o alone.
            theirs: the kernel that takes what this one does not.
        """

        supports_packed_decode = True
        supports_packed_decode_safe_gate = True
        supports_safe_gate = True
        supports_safe_gate_verify = True
        supports_strided_target_verify_qkv = True
        supports_track_state_snapshot = True

        def __init__(self, per_channel: bool, theirs: Any) -> None:
            self.per_channel, self.theirs = per_channel, theirs
            self._tables: dict[int, tuple[Tensor, Tensor]] = {}
            self._tracked: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None

        # -- Rows

        def _gate_rows(self, a: Tensor, lead: tuple[int, int], state: Tensor) -> Tensor:
            """Gates ``[*lead, HV]``, or ``[*lead, HV, K]``, of any of the shapes that they have."""
            HV, K = state.shape[-3], state.shape[-1]
            return a.reshape(*lead, HV, K) if self.per_channel else a.reshape(*lead, HV)

        def _refusal(self, rows: Tensor, states: Tensor, kwargs: dict[str, Any]) -> str | None:
            ring = [name for name in _RING if kwargs.get(name) is not None]
            if ring or kwargs.get("cache_ring"):
                return "replayed states (--enable-linear-replayssm)"
            return refusal(rows, states)

        # -- One token per sequence

        @torch.no_grad()
        def packed_decode(
            self,
            mixed_qkv: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            scale: float,
            ssm_states: Tensor,
            cache_indices: Tensor,
            num_v_heads: int,
            head_v_dim: int,
            lower_bound: float | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """One token per sequence from packed rows ``[B, 2 H K + HV V]``: ``[1, B, HV, V]``."""
            reason = self._refusal(mixed_qkv, ssm_states, kwargs)
            if reason is not None:
                say_once("packed_decode", reason)
                if lower_bound is not None:
                    kwargs["lower_bound"] = lower_bound
                theirs: Tensor = self.theirs.packed_decode(
                    mixed_qkv,
                    a,
                    b,
                    A_log=A_log,
                    dt_bias=dt_bias,
                    scale=scale,
                    ssm_states=ssm_states,
                    cache_indices=cache_indices,
                    num_v_heads=num_v_heads,
                    head_v_dim=head_v_dim,
                    **kwargs,
                )
                return theirs
            count, heads = mixed_qkv.shape[0], key_heads(mixed_qkv, ssm_states)
            widths = (ssm_states.shape[-1], head_v_dim)
            q, k, v = split_rows(mixed_qkv.unsqueeze(1), (heads, num_v_heads), widths)
            o = decode(
                q,
                k,
                v,
                g=self._gate_rows(a, (count, 1), ssm_states),
                beta=b.reshape(count, 1, num_v_heads),
                state_pool=ssm_states,
                read_index=cache_indices,
                scale=scale,
                **gate_options(A_log.view(-1), dt_bias.view(-1), lower_bound),
                **_FORM,
            )
            return o.transpose(0, 1)

        @torch.no_grad()
        def decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            lower_bound: float | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """The same from q, k and v ``[1, B, heads, width]``."""
            reason = self._refusal(q, ssm_states, kwargs)
            if reason is not None:
                say_once("decode", reason)
                if lower_bound is not None:
                    kwargs["lower_bound"] = lower_bound
                theirs: Tensor = self.theirs.decode(
                    q,
                    k,
                    v,
                    a,
                    b,
                    A_log=A_log,
                    dt_bias=dt_bias,
                    ssm_states=ssm_states,
                    cache_indices=cache_indices,
                    query_start_loc=query_start_loc,
                    **kwargs,
                )
                return theirs
            lead = (1, q.shape[1])
            return decode(
                q,
                k,
                v,
                g=self._gate_rows(a, lead, ssm_states),
                beta=b.reshape(*lead, v.shape[2]),
                state_pool=ssm_states,
                read_index=cache_indices[: query_start_loc.shape[0] - 1],
                cu_seqlens=query_start_loc,
                **gate_options(A_log.view(-1), dt_bias.view(-1), lower_bound),
                **_FORM,
            )

        # -- Prompts

        def _lists(
            self, track_chunk_idx: Tensor | None, track_state: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
            """One state per sequence, after so many chunks of it; -1: none."""
            if track_chunk_idx is None or track_state is None:
                return None
            if self._tracked is None or self._tracked[0] is not track_chunk_idx:
                # The same tensor comes to every layer of a step: the lists are made once.
                count, device = track_chunk_idx.shape[0], track_chunk_idx.device
                cu = torch.arange(count + 1, dtype=torch.int32, device=device)
                slots = torch.where(track_chunk_idx < 0, track_chunk_idx, cu[:-1].to(torch.int32))
                self._tracked = track_chunk_idx, (cu, track_chunk_idx * _CHUNK, slots)
            return (*self._tracked[1], track_state)

        @torch.no_grad()
        def extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Any,
            beta: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            **kwargs: Any,
        ) -> Any:
            """Prompts, from and to slots: ``(o, None, None)``, of gates per channel o alone."""
            reason = self._refusal(q, ssm_states, kwargs)
            wants_states = kwargs.get("return_intermediate_states")
            if reason is None and kwargs.get("is_spec_decode"):
                reason = "drafted tokens as a prompt"
            if reason is None and not kwargs.get("inplace_update", True):
                reason = "states that are not to be written"
            source = kwargs.get("track_ssm_h_src")
            if reason is None and wants_states and kwargs.get("track_state") is None:
                if source is not None and source.numel() > 0:
                    reason = "a state of every chunk"
            if reason is not None:
                say_once("extend", reason)
                if isinstance(g, _Raw):
                    gate = importlib.import_module(_GDN).fused_gdn_gating
                    A_log, dt_bias = g.options["A_log"], g.options["dt_bias"]
                    g, beta = gate(A_log, g.rows, beta, dt_bias)
                return self.theirs.extend(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    ssm_states=ssm_states,
                    cache_indices=cache_indices,
                    query_start_loc=query_start_loc,
                    **kwargs,
                )
            lead, out = (1, q.shape[1]), kwargs.get("output")
            options: dict[str, Any] = {"beta_form": "value"}
            if isinstance(g, _Raw):
                options = {**g.options, "beta_form": "sigmoid"}
                g = g.rows
            elif kwargs.get("A_log") is not None:
                options = gate_options(
                    kwargs["A_log"].view(-1),
                    None if kwargs.get("dt_bias") is None else kwargs["dt_bias"].view(-1),
                    kwargs.get("lower_bound"),
                )
            if kwargs.get("beta_is_raw"):
                options["beta_form"] = "sigmoid"
            if out is not None and (out.shape != v.shape or out.dtype != v.dtype):
                out = None
            count = query_start_loc.shape[0] - 1
            o, _ = delta_rule(
                q,
                k,
                v,
                g=self._gate_rows(g, lead, ssm_states),
                beta=beta.reshape(*lead, v.shape[2]),
                state_pool=ssm_states,
                read_index=cache_indices[:count],
                cu_seqlens=query_start_loc,
                checkpoints=self._lists(kwargs.get("track_chunk_idx"), kwargs.get("track_state")),
                split=_split(),  # type: ignore[arg-type]
                out=out,
                qk_l2norm=True,
                state_layout="vk",
                **options,
            )
            if self.per_channel:
                return (o, None) if wants_states else o
            return o, None, None

        # -- Drafted tokens

        def _table(self, rows: Tensor, steps: int) -> Tensor:
            """The slots of every drafted token: those of row r are r * steps and on."""
            known = self._tables.get(steps)
            if known is not None and known[0] is rows:
                return known[1]
            steps_of = torch.arange(steps, dtype=rows.dtype, device=rows.device)
            table = rows.unsqueeze(1) * steps + steps_of
            # What a graph computes is there when that graph has run, not before: kept is only
            # what is computed at once. The server's warm-up comes before its captures.
            if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._tables[steps] = rows, table
            return table

        @torch.no_grad()
        def target_verify(
            self,
            A_log: Tensor,
            dt_bias: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            intermediate_states_buffer: Tensor,
            intermediate_state_indices: Tensor,
            cache_steps: int,
            retrieve_parent_token: Tensor | None = None,
            lower_bound: float | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """Drafted tokens: the pool is read, the state after every token goes to a scratch."""
            reason = self._refusal(q, ssm_states, kwargs)
            scratch = intermediate_states_buffer
            if reason is None and kwargs.get("fused_accept_state_indices") is not None:
                reason = "states that stay in the scratch"
            if reason is None and not scratch.is_contiguous():
                reason = f"a scratch of strides {tuple(scratch.stride())}"
            if reason is None and retrieve_parent_token is not None:
                if cache_steps > _MOST_TREE_TOKENS:
                    reason = f"a tree of {cache_steps} tokens"
            if reason is not None:
                say_once("target_verify", reason)
                if lower_bound is not None:
                    kwargs["lower_bound"] = lower_bound
                theirs: Tensor = self.theirs.target_verify(
                    A_log=A_log,
                    dt_bias=dt_bias,
                    q=q,
                    k=k,
                    v=v,
                    a=a,
                    b=b,
                    ssm_states=ssm_states,
                    cache_indices=cache_indices,
                    query_start_loc=query_start_loc,
                    intermediate_states_buffer=intermediate_states_buffer,
                    intermediate_state_indices=intermediate_state_indices,
                    cache_steps=cache_steps,
                    retrieve_parent_token=retrieve_parent_token,
                    **kwargs,
                )
                return theirs
            count, lead = query_start_loc.shape[0] - 1, (1, q.shape[1])
            parents = None
            if retrieve_parent_token is not None:
                # The first token has no parent, and SGLang leaves a 0 there that nobody reads.
                retrieve_parent_token[:count, :1].fill_(-1)
                parents = retrieve_parent_token[:count]
            return decode(
                q,
                k,
                v,
                g=self._gate_rows(a, lead, ssm_states),
                beta=b.reshape(*lead, v.shape[2]),
                state_pool=ssm_states,
                read_index=cache_indices[:count],
                write_pool=scratch.view(-1, *scratch.shape[2:]),
                write_index=self._table(intermediate_state_indices, cache_steps)[:count],
                parents=parents,
                cu_seqlens=query_start_loc,
                **gate_options(A_log.view(-1), dt_bias.view(-1), lower_bound),
                **_FORM,
            )

    return DelticKernel


_FORM: dict[str, Any] = {"beta_form": "sigmoid", "qk_l2norm": True, "state_layout": "vk"}
_RING = (
    "replayssm_d",
    "replayssm_k",
    "replayssm_g",
    "replayssm_write_pos",
    "replayssm_rawv",
    "replayssm_rawk",
    "replayssm_beta",
)


def kernel(per_channel: bool = False) -> Any:
    """A kernel as SGLang's dispatchers hold them, for gates per head or per channel."""
    kind = "kda" if per_channel else "gdn"
    module = importlib.import_module(f"{_LINEAR}.kernels.{kind}_triton")
    theirs = module.TritonKDAKernel if per_channel else module.TritonGDNKernel
    return _kernel_class()(per_channel, theirs())


# ---- Dispatchers ----------------------------------------------------------------------------------

_PHASES = ("decode", "prefill", "verify")


def _chosen(backends: tuple[Any, Any, Any]) -> dict[str, bool]:
    """The phases that the server's arguments give to this backend.

    A name that SGLang does not know is ``CUSTOM`` to its dispatchers; whose it is only the
    arguments say. Verification follows decoding where nobody says otherwise.
    """
    custom = [getattr(backend, "value", None) == "custom" for backend in backends]
    group = getattr(_settings("get_exec"), "mamba", None)
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
            original(self, *(triton if ours[p] else b for p, b in zip(_PHASES, backends, strict=True)))
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
            _switch.turn_on(_title(), _conv_target(module), {})

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
    if found is None or _switch.held(module, name) is not None:
        return []
    if other_arguments(found, _CONV_ARGUMENTS) is not None:
        return []
    known = (*_CONV_ARGUMENTS, "pad_slot_id", "validate_data")
    put = with_fallback(_conv_step, _conv_step_refusal, known)(found, name)
    title = f"{module.__name__.rpartition('.')[2]}.{name}"
    return [Target(module, name, put, title, "deltic.causal_conv1d_update")]


# ---- The classes around the dispatchers -------------------------------------------------------------


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
            return isinstance(self.kernel_dispatcher.extend_kernel, _kernel_class())

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
            return _Raw(a, gate_options(layer.A_log, layer.dt_bias)), b

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


# ---- What is replaced where -----------------------------------------------------------------------


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


def _class_targets(
    module: Any, dispatcher: str, backend: str, per_channel: bool, left: dict[str, str]
) -> list[Target]:
    """Of a module: its dispatcher's making, and the backend's class."""
    targets = []
    owner = getattr(module, dispatcher, None)
    title = f"{dispatcher}.__init__"
    if owner is None or "__init__" not in vars(owner):
        left[title] = "not in this version"
        return []
    put = _switch.held(owner, "__init__")
    if put is None:
        reason = other_arguments(vars(owner)["__init__"], _DISPATCHER)
        if reason is not None:
            left[title] = reason
            return []
        put = _make_dispatcher(module, per_channel)(vars(owner)["__init__"], "__init__")
    targets.append(Target(owner, "__init__", put, title, "the backend 'deltic'"))
    held = _switch.held(module, backend)
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
    _GDN: ("GDNKernelDispatcher", "GDNAttnBackend", False),
    _KDA: ("KDAKernelDispatcher", "KDAAttnBackend", True),
}


def _title() -> str:
    return f"SGLang {getattr(importlib.import_module('sglang'), '__version__', 'of no version')}"


def _check_version(version: str) -> None:
    numbers = _serving.numbers_of(version)
    # A checkout of no version says 0.0.0: its names are looked at instead.
    if numbers and numbers >= (0, 1) and numbers < _OLDEST:
        raise ImportError(
            "deltic.integrations.sglang: SGLang: expected 0.5.23 or later, whose dispatchers are in "
            f"{_GDN}, got {version}"
        )


def _choice_target(left: dict[str, str]) -> list[Target]:
    title = "--linear-attn-backend"
    try:
        listed = _listed(importlib.import_module("sglang.srt.arg_groups.choices"))
        return [Target(listed, "listed", True, title, f"takes {NAME!r}")]
    except (ImportError, AttributeError) as error:
        left[title] = f"not in this version: {error}"
        return []


def enable() -> Report:
    """Makes ``deltic`` one of SGLang's backends for linear attention, in this process.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: SGLang is not installed, or a version without these dispatchers.
    """
    try:
        sglang = importlib.import_module("sglang")
    except ImportError as error:
        raise ImportError(
            "deltic.integrations.sglang: SGLang: expected an installed package (pip install "
            f"sglang), got: {error}"
        ) from error
    _check_version(str(getattr(sglang, "__version__", "")))
    left: dict[str, str] = {}
    targets = []
    for name, (dispatcher, backend, per_channel) in _PLACES.items():
        module, reason = find_module(name)
        if module is None:
            left[name] = reason
        else:
            targets += _class_targets(module, dispatcher, backend, per_channel, left)
    if not targets:
        raise ImportError(
            "deltic.integrations.sglang: SGLang: expected one of the dispatchers that are known "
            + f"here, got {_title()}: "
            + "; ".join(f"{name}: {reason}" for name, reason in left.items())
        )
    targets += _choice_target(left)
    return _switch.turn_on(_title(), targets, left)


def disable() -> Report:
    """Puts back everything that :func:`enable` or :func:`register` replaced.

    Dispatchers that SGLang has made since keep their kernels.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    _watch.end()
    return _switch.turn_off("SGLang")


def _on_import(name: str) -> None:
    """Replaces what is in a module that has just been imported, and says so in one line."""
    left: dict[str, str] = {}
    targets = _class_targets(importlib.import_module(name), *_PLACES[name], left)
    report = _switch.turn_on(_title(), targets, left)
    if report.done:
        _log.info("%s", report.line())
    for title, reason in left.items():
        _log.warning("%s: not replaced: %s: %s", _title(), title, reason)


_watch = Watch(tuple(_PLACES), _on_import)


def register() -> None:
    """What SGLang calls in each of its processes: :func:`enable`, of modules as they are imported.

    An SGLang that is too old is left as it is, with a line in the log.
    """
    left: dict[str, str] = {}
    try:
        _check_version(str(getattr(importlib.import_module("sglang"), "__version__", "")))
        report = _switch.turn_on(_title(), _choice_target(left), left)
    except ImportError as error:
        _log.warning("%s", error)
        return
    for title, reason in left.items():
        _log.warning("%s: not replaced: %s: %s", report.title, title, reason)
    _watch.begin()
