"""vLLM's layers with the delta rule, on deltic's operators.

    >>> from deltic.integrations import vllm
    >>> print(vllm.enable())      # doctest: +SKIP
    >>> vllm.disable()            # doctest: +SKIP

Where deltic is installed beside vLLM, :func:`register` does it in every process of the server, when
the model's layers are imported (entry point ``vllm.general_plugins``; the environment variable
``VLLM_PLUGINS`` chooses among plugins).

The core of a layer, between its projections, is replaced as a whole: the convolution and the
recurrence run on vLLM's pools as they are, with slot 0 as none, and write into the layer's output.
What deltic does not take goes to what was there before, and a line in the log says why.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._native import decode, delta_rule
from .._norm import plain_rms_norm
from ..layers._norms import GATE_ACTIVATIONS
from . import _serving
from ._late import Watch
from ._patch import Report, Switch, Target, named, say_once
from ._serving import (
    conv_drafts,
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

__all__ = ["disable", "enable", "register"]

_switch = Switch()
_log = logging.getLogger("deltic.integrations")
_OLDEST = (0, 32)
_NULL = 0  # vLLM's block 0 belongs to nobody
_NULLS = {"null_slot": _NULL, "state_layout": "vk"}

_LAYERS = "vllm.model_executor.layers.mamba.gdn"
_QWEN = f"{_LAYERS}.qwen_gdn_linear_attn"
_OLMO = f"{_LAYERS}.olmo_gdn_linear_attn"
_KIMI = f"{_LAYERS}.kimi_gdn_linear_attn"
_K3 = "vllm.models.kimi_k3.nvidia.kda"
_K3_OPS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_GLM = "vllm.models.glm5next.common.kda"
_BAILING = "vllm.model_executor.models.bailing_moe_v3"

# What a layer's core reads of the batch's description.
_METADATA = (
    "num_prefills",
    "num_decodes",
    "num_decode_tokens",
    "num_spec_decodes",
    "num_actual_tokens",
    "has_initial_state",
    "spec_query_start_loc",
    "non_spec_query_start_loc",
    "spec_state_indices_tensor",
    "non_spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_token_indx",
    "non_spec_token_indx",
    "num_accepted_tokens",
    "prefill_query_start_loc",
    "prefill_state_indices",
    "prefill_has_initial_state",
)


def _split() -> str:
    """Whether long prompts may be divided by what else is in the batch: not if vLLM forbids it."""
    envs = importlib.import_module("vllm.envs")
    return "off" if getattr(envs, "VLLM_BATCH_INVARIANT", False) else "auto"


# ---- The core of a layer --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Core:
    """What is a layer's own in a step: parameters, pools, sizes."""

    weight: Tensor
    bias: Tensor | None
    activation: Any
    windows: Tensor  # [slots, D, S]
    states: Tensor  # [slots, HV, V, K]
    gate: dict[str, Any]
    beta_form: str = "sigmoid"

    def refusal(self, rows: Tensor) -> str | None:
        found = conv_refusal(rows, self.weight, self.windows, self.activation)
        return found if found is not None else refusal(rows, self.states)

    def rows(self, y: Tensor) -> dict[str, Tensor]:
        HV, V, K = self.states.shape[1:]
        q, k, v = split_rows(y, (key_heads(y, self.states), HV), (K, V))
        return {"q": q, "k": k, "v": v}

    def options(self) -> dict[str, Any]:
        return {
            **self.gate,
            **_NULLS,
            "beta_form": self.beta_form,
            "qk_l2norm": True,
            "state_pool": self.states,
        }

    def convolution(self) -> dict[str, Any]:
        return {"state": self.windows, "activation": self.activation, "null_slot": _NULL}


def _drafts(core: _Core, m: Any, x: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
    """Drafted tokens: a row of slots per sequence, read by the tokens accepted before."""
    count = m.num_spec_decodes
    table, accepted = m.spec_state_indices_tensor[:count], m.num_accepted_tokens[:count]
    cu_seqlens = m.spec_query_start_loc[: count + 1]
    y = conv_drafts(
        x,
        core.weight,
        core.bias,
        index=table[:, 0],
        accepted=accepted,
        cu_seqlens=cu_seqlens,
        **core.convolution(),
    )
    decode(
        **core.rows(y.unsqueeze(0)),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        **core.options(),
        read_index=table,
        accepted=accepted,
        cu_seqlens=cu_seqlens,
        out=out.unsqueeze(0),
    )


def _tokens(
    core: _Core, y: Tensor, g: Tensor, beta: Tensor, index: Tensor, out: Tensor
) -> None:
    """One token per sequence, behind the convolution."""
    decode(
        **core.rows(y.unsqueeze(1)),
        g=g.unsqueeze(1),
        beta=beta.unsqueeze(1),
        **core.options(),
        read_index=index,
        out=out.unsqueeze(1),
    )


def _lists(m: Any, first: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where states inside the prompts are kept, of the sequences from one on; None: nowhere."""
    kept = getattr(m, "checkpoint", None)
    if kept is None:
        return None
    tokens, slots = kept.checkpoint_offsets[first:], kept.state_indices[first:]
    # One list for every layer of the step: it lives as long as what describes the step.
    made = kept.__dict__.setdefault("_deltic_counts", {})
    count = tokens.shape[0]
    if count not in made:
        made[count] = torch.arange(count + 1, dtype=torch.int32, device=tokens.device)
    return made[count], tokens, slots


def _others(core: _Core, m: Any, x: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
    """Sequences without drafted tokens: prompts, or single tokens, or both, these first."""
    if m.num_prefills == 0:
        index = m.non_spec_state_indices_tensor[: x.shape[0]]
        y = conv_step(x, core.weight, core.bias, index=index, **core.convolution())
        _tokens(core, y, g, beta, index, out)
        return
    y = conv_prefill(
        x,
        core.weight,
        core.bias,
        index=m.non_spec_state_indices_tensor,
        has_initial_state=m.has_initial_state,
        cu_seqlens=m.non_spec_query_start_loc,
        checkpoints=_lists(m, 0),
        **core.convolution(),
    )
    first = count = 0
    if m.spec_sequence_masks is None and m.num_decodes > 0:
        first, count = m.num_decode_tokens, m.num_decodes
        index = m.non_spec_state_indices_tensor[:count]
        _tokens(core, y[:first], g[:first], beta[:first], index, out[:first])
    lists = _lists(m, count)
    delta_rule(
        **core.rows(y[first:].unsqueeze(0)),
        g=g[first:].unsqueeze(0),
        beta=beta[first:].unsqueeze(0),
        **core.options(),
        read_index=m.prefill_state_indices,
        has_initial_state=m.prefill_has_initial_state,
        cu_seqlens=m.prefill_query_start_loc,
        checkpoints=None if lists is None else (*lists, core.states),
        split=_split(),
        out=out[first:].unsqueeze(0),
    )


def _run(core: _Core, m: Any, x: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
    """A layer's step on rows ``[T, ...]``: o into ``out [T, HV, V]``."""
    if m.spec_sequence_masks is None:
        _others(core, m, x, g, beta, out)
    elif m.num_prefills == 0 and m.num_decodes == 0:
        _drafts(core, m, x, g, beta, out)
    else:  # sequences of both kinds lie between each other
        for run, rows in ((_drafts, m.spec_token_indx), (_others, m.non_spec_token_indx)):
            part = out.new_empty((rows.shape[0], *out.shape[1:]))
            run(core, m, *(t.index_select(0, rows) for t in (x, g, beta)), part)
            out.index_copy_(0, rows, part)


def _metadata(module: Any, layer: Any) -> Any | None:
    """The batch's description for a layer; None where vLLM measures memory or warms up."""
    found = module.get_forward_context().attn_metadata
    return found.get(layer.prefix) if isinstance(found, dict) else None


def _windows(module: Any, layer: Any) -> Tensor:
    windows: Tensor = layer.kv_cache[0]
    return windows if module.is_conv_state_dim_first() else windows.transpose(-1, -2)


def _head_core(module: Any, layer: Any) -> _Core:
    """Of the layers with a gate per head."""
    weight = layer.conv1d.weight
    return _Core(
        weight=weight.view(weight.size(0), weight.size(-1)),
        bias=layer.conv1d.bias,
        activation=layer.activation,
        windows=_windows(module, layer),
        states=layer.kv_cache[1],
        gate=gate_options(layer.A_log, layer.dt_bias),
        beta_form="2sigmoid" if getattr(layer, "allow_neg_eigval", False) else "sigmoid",
    )


def _channel_core(module: Any, layer: Any) -> _Core:
    """Of the layers with a gate per channel."""
    weight = layer.conv1d.weight
    return _Core(
        weight=weight.view(weight.size(0), weight.size(-1)),
        bias=layer.conv1d.bias,
        activation="silu",
        windows=_windows(module, layer),
        states=layer.kv_cache[1],
        gate=gate_options(layer.A_log, layer.dt_bias, layer.gate_lower_bound),
    )


def _make_head_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def _forward_core(
            self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> Any:
            m = _metadata(module, self)
            if m is None:  # nothing to warm up: there is nothing to compile or to tune
                return None
            core, count = _head_core(module, self), m.num_actual_tokens
            reason = core.refusal(mixed_qkv)
            if reason is not None:
                say_once(f"{type(self).__name__}.{name}", reason)
                return original(self, mixed_qkv, b, a, core_attn_out)
            _run(core, m, mixed_qkv[:count], a[:count], b[:count], core_attn_out[:count])
            return None

        return named(_forward_core, original, name)

    return make


def _norm(x: Tensor, norm: Any, z: Tensor, out: Tensor) -> None:
    """A layer's gated norm into its output."""
    activation: Any = "sigmoid" if norm.activation == "sigmoid" else "silu"
    plain_rms_norm(x, norm.weight, z, norm.eps, activation, out=out)


def _make_normed_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def _forward_core_fused_norm(
            self: Any,
            mixed_qkv: Tensor,
            b: Tensor,
            a: Tensor,
            output_gate: Tensor,
            core_attn_out: Tensor,
        ) -> Any:
            m = _metadata(module, self)
            if m is None:
                return None
            core, count = _head_core(module, self), m.num_actual_tokens
            reason = core.refusal(mixed_qkv)
            if reason is None and self.norm.activation not in GATE_ACTIVATIONS:
                reason = f"a norm with the activation {self.norm.activation!r}"
            if reason is not None:
                say_once(f"{type(self).__name__}.{name}", reason)
                return original(self, mixed_qkv, b, a, output_gate, core_attn_out)
            o = torch.empty_like(core_attn_out[:count])
            _run(core, m, mixed_qkv[:count], a[:count], b[:count], o)
            _norm(o, self.norm, output_gate[:count], core_attn_out[:count])
            return None

        return named(_forward_core_fused_norm, original, name)

    return make


def _make_channel_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def run(
            self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
        ) -> Any:
            m = _metadata(module, self)
            if m is None:
                return None
            core, count = _channel_core(module, self), m.num_actual_tokens
            reason = core.refusal(mixed_qkv)
            if reason is None and self.o_norm.activation not in GATE_ACTIVATIONS:
                reason = f"a norm with the activation {self.o_norm.activation!r}"
            if reason is not None:
                say_once(f"{type(self).__name__}.{name}", reason)
                return original(self, mixed_qkv, g1, g2, beta, core_attn_out)
            out = core_attn_out[0, :count]
            o = torch.empty_like(out)
            _run(core, m, mixed_qkv[:count], g1[0, :count], beta[0, :count], o)
            _norm(o, self.o_norm, g2[:count], out)
            return None

        # Where vLLM divides its graphs around a layer, it does so around ours.
        around = getattr(module, "eager_break_during_capture", None)
        return named(run if around is None else around(run), original, name)

    return make


def _make_no_warmup(original: Any, name: str) -> Any:
    def _warmup_prefill_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: what runs is compiled, and chooses without measuring."""

    return named(_warmup_prefill_kernels, original, name)


# ---- Prompts of the layer with a gate per head, where somebody calls its operator ------------------


def _rule_of(module: Any) -> Any:
    """The class that vLLM makes instead of its own ``ChunkGatedDeltaRule``."""
    base: Any = module.ChunkGatedDeltaRule

    class DelticChunkGatedDeltaRule(base):  # type: ignore[misc]
        """Prompts in chunks, from and to states ``[N, HV, V, K]``."""

        def __init__(self) -> None:
            super().__init__()
            self._theirs, self._forward_method = self._forward_method, self.forward_deltic

        def forward_deltic(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor,
            output_final_state: bool,
            cu_seqlens: Tensor | None = None,
            chunk_indices: Tensor | None = None,
            chunk_offsets: Tensor | None = None,
            use_qk_l2norm_in_kernel: bool = True,
            core_attn_out: Tensor | None = None,
            aiter_prefill_metadata: object | None = None,
        ) -> Any:
            reason = refusal(q, initial_state)
            if reason is not None:
                say_once("ChunkGatedDeltaRule", reason)
                return self._theirs(
                    q=q,
                    k=k,
                    v=v,
                    g=g,
                    beta=beta,
                    initial_state=initial_state,
                    output_final_state=output_final_state,
                    cu_seqlens=cu_seqlens,
                    chunk_indices=chunk_indices,
                    chunk_offsets=chunk_offsets,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    core_attn_out=core_attn_out,
                    aiter_prefill_metadata=aiter_prefill_metadata,
                )
            out = None
            if core_attn_out is not None:
                out = core_attn_out.view(-1)[: v.numel()].view(v.shape)
            with torch.no_grad():
                return delta_rule(
                    q,
                    k,
                    v,
                    g=g,
                    beta=beta,
                    initial_state=initial_state,
                    output_final_state=output_final_state,
                    cu_seqlens=cu_seqlens,
                    qk_l2norm=use_qk_l2norm_in_kernel,
                    state_layout="vk",
                    split=_split(),  # type: ignore[arg-type]
                    out=out,
                )

    DelticChunkGatedDeltaRule.name = base.__name__
    return DelticChunkGatedDeltaRule


# ---- Functions of the other layers with a gate per channel -----------------------------------------


def _pooled_refusal(
    q: Tensor,
    initial_state: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inplace_final_state: bool = True,
    **_: Any,
) -> str | None:
    if initial_state is None or ssm_state_indices is None or cu_seqlens is None:
        return "no pool, no slots or no offsets"
    if not inplace_final_state:
        return "final states apart from the pool"
    return refusal(q, initial_state)


@torch.no_grad()
def _pooled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    pool: Tensor,
    index: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor | None,
    out: Tensor | None,
    scale: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A few tokens per sequence on a pool: one slot each, or a row of slots for drafted tokens."""
    count = cu_seqlens.shape[0] - 1
    index = index[:count]
    if accepted is not None:
        accepted = accepted[:count]
    elif index.dim() == 2:
        index = index[:, 0]
    o = decode(
        q,
        k,
        v,
        g=g,
        beta=beta,
        state_pool=pool,
        read_index=index,
        accepted=accepted,
        cu_seqlens=cu_seqlens,
        scale=scale,
        out=out,
        **_NULLS,
        **options,
    )
    return o, pool


def _k3_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,  # where the gate is computed: inside, whatever this says
) -> tuple[Tensor, Tensor]:
    return _pooled(
        q,
        k,
        v,
        raw_g,
        raw_beta,
        pool=initial_state,
        index=ssm_state_indices,
        cu_seqlens=cu_seqlens,
        accepted=num_accepted_tokens,
        out=out,
        scale=None,
        beta_form="sigmoid",
        qk_l2norm=True,
        **gate_options(A_log, dt_bias, lower_bound),
    )


def _k3_packed_refusal(mixed_qkv: Tensor, initial_state: Tensor, **_: Any) -> str | None:
    return refusal(mixed_qkv, initial_state)


@torch.no_grad()
def _k3_packed(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    HV, V, K = initial_state.shape[1:]
    q, k, v = split_rows(mixed_qkv.unsqueeze(1), (HV, HV), (K, V))
    if out is None:
        out = mixed_qkv.new_empty((1, mixed_qkv.shape[0], HV, V))
    decode(
        q,
        k,
        v,
        g=raw_g.transpose(0, 1),
        beta=raw_beta.transpose(0, 1),
        state_pool=initial_state,
        read_index=state_indices,
        beta_form="sigmoid",
        qk_l2norm=True,
        scale=scale,
        out=out.transpose(0, 1),
        **_NULLS,
        **gate_options(A_log, dt_bias, lower_bound),
    )
    return out, initial_state


def _chunk_refusal(q: Tensor, initial_state: Tensor | None = None, **_: Any) -> str | None:
    return refusal(q, initial_state)


@torch.no_grad()
def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Prompts in chunks, from and to states ``[N, HV, V, K]``."""
    return delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_layout="vk",
        split=_split(),  # type: ignore[arg-type]
        out=out,
        **options,
    )


def _k3_chunks(
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    lower_bound: float | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    gate = gate_options(A_log, g_bias, lower_bound)
    return _chunks(g=raw_g, beta=raw_beta, beta_form="sigmoid", **gate, **given)


def _glm_chunks(
    raw_g: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    gate = gate_options(A_log, g_bias, lower_bound if safe_gate else None)
    return _chunks(g=raw_g, **gate, **given)


def _bailing_chunks(
    safe_gate: bool = False, lower_bound: float | None = None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    return _chunks(**given)  # g has its gate already


def _glm_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    safe_gate: bool = False,  # of functions whose g has its gate already
) -> tuple[Tensor, Tensor]:
    bias = None if g_bias is None else g_bias.reshape(-1)
    gate = gate_options(a_log, bias, lower_bound) if compute_gate else {}
    return _pooled(
        q,
        k,
        v,
        g,
        beta,
        pool=initial_state,
        index=ssm_state_indices,
        cu_seqlens=cu_seqlens,
        accepted=num_accepted_tokens,
        out=out,
        scale=scale,
        beta_form="sigmoid" if sigmoid_beta else "value",
        qk_l2norm=use_qk_l2norm_in_kernel,
        **gate,
    )


# ---- Convolutions ---------------------------------------------------------------------------------


def _conv_refusal(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor | None = None,
    activation: Any = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = _NULL,
    **_: Any,
) -> str | None:
    if conv_states is None:
        return "no pool"
    if x.dim() != 2 or x.stride(0) != 1:
        return f"rows of strides {tuple(x.stride())}"
    if pad_slot_id != -1 or null_block_id not in (None, _NULL):
        return f"slots {pad_slot_id} and {null_block_id} as none"
    return conv_refusal(x, weight, conv_states, activation)


@torch.no_grad()
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: Any = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = _NULL,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    return conv_prefill(
        x.transpose(0, 1),
        weight,
        bias,
        state=conv_states,
        index=cache_indices,
        # vLLM reads a slot only where it says so.
        has_initial_state=(
            torch.zeros(query_start_loc.shape[0] - 1, dtype=torch.bool, device=x.device)
            if has_initial_state is None
            else has_initial_state
        ),
        cu_seqlens=query_start_loc,
        activation=activation,
        null_slot=-1 if null_block_id is None else _NULL,
    ).transpose(0, 1)


def _conv_update_refusal(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    activation: Any = None,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    null_block_id: int | None = _NULL,
    **_: Any,
) -> str | None:
    if x.dim() != 2 or x.stride(1) != 1:
        return f"rows of shape {tuple(x.shape)} and strides {tuple(x.stride())}"
    if conv_state_indices is None or conv_state_indices.dim() != 1:
        return "no list of slots"
    if null_block_id not in (None, _NULL):
        return f"slot {null_block_id} as none"
    return conv_refusal(x, weight, conv_state, activation)


@torch.no_grad()
def _conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    conv_state_indices: Any = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = _NULL,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    options: dict[str, Any] = {
        "state": conv_state,
        "index": conv_state_indices,
        "activation": activation,
        "null_slot": -1 if null_block_id is None else _NULL,
        "out": out,
    }
    if query_start_loc is None:
        return conv_step(x, weight, bias, **options)
    cu_seqlens = query_start_loc[: conv_state_indices.shape[0] + 1]
    return conv_drafts(
        x, weight, bias, accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, **options
    )


# ---- What is replaced where -----------------------------------------------------------------------


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


_OF_CHUNKS = ("scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_OF_CHUNKS = ("q", "k", "v", *_OF_CHUNKS, "cu_seqlens")


@dataclass(frozen=True)
class _Function:
    """A function of a module, the replacement, and the arguments that it is called with."""

    name: str
    ours: Callable[..., Any]
    refuses: Callable[..., str | None]
    knows: tuple[str, ...]
    note: str

    def make(self) -> Callable[[Any, str], Any]:
        return with_fallback(self.ours, self.refuses, self.knows)


def _by_arguments(
    name: str, ours: Callable[..., Any], refuses: Callable[..., str | None], note: str
) -> _Function:
    plain = getattr(ours, "__wrapped__", ours)
    return _Function(name, ours, refuses, _arguments(plain), note)


_CONVOLUTIONS = (
    _by_arguments("causal_conv1d_fn", _conv, _conv_refusal, "deltic.causal_conv1d"),
    _by_arguments(
        "causal_conv1d_update", _conv_update, _conv_update_refusal, "deltic.causal_conv1d_update"
    ),
)
_K3_GATE = ("raw_g", "raw_beta", "A_log", "g_bias", "lower_bound", "out")
_GLM_GATE = ("raw_g", "beta", "A_log", "g_bias", "safe_gate", "lower_bound")
_FUNCTIONS: dict[str, tuple[_Function, ...]] = {
    _K3: _CONVOLUTIONS,
    _K3_OPS: (
        _by_arguments("fused_recurrent_kda", _k3_recurrent, _pooled_refusal, "deltic.decode"),
        _by_arguments(
            "fused_recurrent_kda_packed_decode", _k3_packed, _k3_packed_refusal, "deltic.decode"
        ),
        _Function(
            "chunk_kda_with_fused_gate",
            _k3_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, *_K3_GATE),
            "deltic.delta_rule",
        ),
    ),
    _GLM: (
        *_CONVOLUTIONS,
        _by_arguments("fused_recurrent_kda", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        _Function(
            "chunk_kda_with_fused_gate",
            _glm_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, *_GLM_GATE),
            "deltic.delta_rule",
        ),
    ),
    _BAILING: (
        *_CONVOLUTIONS,
        _by_arguments("fused_recurrent_kda", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        _by_arguments("fused_recurrent_kda_fwd", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        _Function(
            "chunk_kda",
            _bailing_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, "g", "beta", "safe_gate", "lower_bound"),
            "deltic.delta_rule",
        ),
    ),
}
_HEAD_ARGUMENTS = ("self", "mixed_qkv", "b", "a", "core_attn_out")
_NORMED_ARGUMENTS = ("self", "mixed_qkv", "b", "a", "output_gate", "core_attn_out")
_CHANNEL_ARGUMENTS = ("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
# Methods of a layer's class: module, class, method, its arguments, what makes the replacement.
_METHODS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    (_QWEN, "QwenGatedDeltaNetAttention", "_forward_core", _HEAD_ARGUMENTS, _make_head_core),
    (
        _QWEN,
        "QwenGatedDeltaNetAttention",
        "_forward_core_fused_norm",
        _NORMED_ARGUMENTS,
        _make_normed_core,
    ),
    (
        _QWEN,
        "QwenGatedDeltaNetAttention",
        "_warmup_prefill_kernels",
        ("self",),
        lambda _: _make_no_warmup,
    ),
    (_OLMO, "OlmoHybridGatedDeltaNetAttention", "_forward_core", _HEAD_ARGUMENTS, _make_head_core),
    (_KIMI, "KimiGatedDeltaNetAttention", "_forward", _CHANNEL_ARGUMENTS, _make_channel_core),
)
_MODULES = (_QWEN, _OLMO, _KIMI, *_FUNCTIONS)


def _lacking(module: Any) -> str | None:
    """What a layer's module does not have of what a core asks it for."""
    for name in ("get_forward_context", "is_conv_state_dim_first", "GDNAttentionMetadata"):
        if not hasattr(module, name):
            return f"its module has no {name}"
    metadata = module.GDNAttentionMetadata
    if is_dataclass(metadata):
        known = {field.name for field in fields(metadata)}
        missing = [name for name in _METADATA if name not in known]
        if missing:
            return f"GDNAttentionMetadata has no field {missing[0]!r}"
    return None


def _made(owner: Any, name: str, make: Callable[[Any, str], Any]) -> Any:
    """What was put there before, or a new replacement."""
    put = _switch.held(owner, name)
    return make(vars(owner)[name], name) if put is None else put


def _method_targets(module: Any, left: dict[str, str]) -> list[Target]:
    targets = []
    for place, class_name, name, arguments, makes in _METHODS:
        if place != module.__name__:
            continue
        title, owner = f"{class_name}.{name}", getattr(module, class_name, None)
        method = None if owner is None else vars(owner).get(name)
        if method is None:
            left[title] = "not in this version"
            continue
        reason = _lacking(module)
        if reason is None and _switch.held(owner, name) is None:
            reason = other_arguments(method, arguments) if len(arguments) > 1 else None
        if reason is not None:
            left[title] = reason
            continue
        targets.append(Target(owner, name, _made(owner, name, makes(module)), title, "deltic"))
    return targets


@cache
def _rule(module: Any) -> Any:
    return _rule_of(module)


def _rule_target(module: Any, left: dict[str, str]) -> list[Target]:
    """The operator over prompts, through vLLM's registry of classes from elsewhere."""
    title = "ChunkGatedDeltaRule"
    registry = getattr(importlib.import_module("vllm.model_executor.custom_op"), "op_registry_oot")
    if not hasattr(module, title):
        left[title] = "not in this version"
        return []
    taken = registry.get(title)
    if taken is not None and taken is not _rule(module):
        left[title] = f"{taken.__module__}.{taken.__name__} is registered for it"
        return []
    return [Target(registry, title, _rule(module), title, "deltic.delta_rule")]


def _targets_of(module: Any, left: dict[str, str]) -> list[Target]:
    targets = _method_targets(module, left)
    if module.__name__ == _QWEN:
        targets += _rule_target(module, left)
    for function in _FUNCTIONS.get(module.__name__, ()):
        title = f"{module.__name__.removeprefix('vllm.')}.{function.name}"
        if function.name not in vars(module):
            left[title] = "not in this version"
            continue
        put = _made(module, function.name, function.make())
        targets.append(Target(module, function.name, put, title, function.note))
    return targets


def _title() -> str:
    return f"vLLM {getattr(importlib.import_module('vllm'), '__version__', 'of no version')}"


def _check_version(version: str) -> None:
    numbers = _serving.numbers_of(version)
    # A checkout of no version says 0.x.y.dev or 0.0.0: its names are looked at instead.
    if numbers and numbers >= (0, 1) and numbers < _OLDEST:
        raise ImportError(
            "deltic.integrations.vllm: vLLM: expected 0.32 or later, whose layers are in "
            f"{_LAYERS}, got {version}"
        )


def enable() -> Report:
    """Makes vLLM's delta-rule layers run on deltic's operators, in this process.

    Models that exist already change with those that are built later.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: vLLM is not installed, or a version without these layers.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise ImportError(
            "deltic.integrations.vllm: vLLM: expected an installed package (pip install vllm), "
            f"got: {error}"
        ) from error
    _check_version(str(getattr(vllm, "__version__", "")))
    left: dict[str, str] = {}
    targets: list[Target] = []
    for name in _MODULES:
        module, reason = find_module(name)
        if module is None:
            left[name] = reason
        else:
            targets += _targets_of(module, left)
    if not targets:
        raise ImportError(
            "deltic.integrations.vllm: vLLM: expected one of the layers that are known here, got "
            + f"{_title()}: "
            + "; ".join(f"{name}: {reason}" for name, reason in left.items())
        )
    return _switch.turn_on(_title(), targets, left)


def disable() -> Report:
    """Puts back everything that :func:`enable` or :func:`register` replaced.

    Operators that vLLM has made since keep their class.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    _watch.end()
    return _switch.turn_off("vLLM")


def _on_import(name: str) -> None:
    """Replaces what is in a module that has just been imported, and says so in one line."""
    left: dict[str, str] = {}
    module = importlib.import_module(name)
    targets = _targets_of(module, left)
    report = _switch.turn_on(_title(), targets, left)
    if report.done:
        _log.info("%s", report.line())
    for title, reason in left.items():
        _log.warning("%s: not replaced: %s: %s", _title(), title, reason)


_watch = Watch(_MODULES, _on_import)


def register() -> None:
    """What vLLM calls in each of its processes: :func:`enable` for layers as they are imported.

    A vLLM that is too old is left as it is, with a line in the log.
    """
    try:
        _check_version(str(getattr(importlib.import_module("vllm"), "__version__", "")))
    except ImportError as error:
        _log.warning("%s", error)
        return
    _watch.begin()
