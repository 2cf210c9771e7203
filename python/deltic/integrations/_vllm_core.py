"""A step of vLLM's layers between their projections: convolution, recurrence, gated norm.

It runs on that server's pools and lists as they are, and writes into the layer's output.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .._native import decode, delta_rule
from .._norm import plain_rms_norm
from .._step import step
from ..layers._norms import GATE_ACTIVATIONS
from ._patch import named, say_once
from ._serving import (
    activation_of,
    conv_drafts,
    conv_prefill,
    conv_refusal,
    conv_step,
    gate_options,
    key_heads,
    refusal,
    split_rows,
)

NULL = 0  # vLLM's block 0 belongs to nobody
FORM: dict[str, Any] = {"null_slot": NULL, "state_layout": "vk"}

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


def may_split() -> Any:
    """Whether long prompts may be divided by what else is in the batch: not if vLLM forbids it."""
    envs = importlib.import_module("vllm.envs")
    return "off" if getattr(envs, "VLLM_BATCH_INVARIANT", False) else "auto"


def lacking(module: Any) -> str | None:
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

    def rows(self, y: Tensor) -> dict[str, Any]:
        HV, V, K = self.states.shape[1:]
        q, k, v = split_rows(y, (key_heads(y, self.states), HV), (K, V))
        return {"q": q, "k": k, "v": v}

    def options(self) -> dict[str, Any]:
        return {
            **self.gate,
            **FORM,
            "beta_form": self.beta_form,
            "qk_l2norm": True,
            "state_pool": self.states,
        }

    def convolution(self) -> dict[str, Any]:
        return {"state": self.windows, "activation": self.activation, "null_slot": NULL}


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


def _tokens(core: _Core, y: Tensor, g: Tensor, beta: Tensor, index: Tensor, out: Tensor) -> None:
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
        split=may_split(),
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
            mine = [t.index_select(0, rows) for t in (x, g, beta)]
            run(core, m, mine[0], mine[1], mine[2], part)
            out.index_copy_(0, rows, part)


def _in_one_call(
    core: _Core,
    m: Any,
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    gated_norm: dict[str, Any],
    z: Tensor | None,
) -> bool:
    """A step of decode alone, or of drafted tokens alone; False: there is something else too.

    On a GPU a step is three launches as well: there the calls are made one by one.
    """
    has_drafts = m.spec_sequence_masks is not None
    if rows[0].is_cuda or m.num_prefills > 0 or (has_drafts and m.num_decodes > 0):
        return False
    lists: dict[str, Any]
    if has_drafts:
        count, windows, tokens = m.num_spec_decodes, core.windows, 0
        table = m.spec_state_indices_tensor[:count]
        lists = {
            "conv_index": table[:, 0],
            "read_index": table,
            "accepted": m.num_accepted_tokens[:count],
            "cu_seqlens": m.spec_query_start_loc[: count + 1],
        }
    else:
        count, windows, tokens = (
            rows[0].shape[0],
            core.windows[:, :, : core.weight.shape[-1] - 1],
            1,
        )
        lists = {"read_index": m.non_spec_state_indices_tensor[:count]}
    x, g, beta = (row.unsqueeze(tokens) for row in rows)
    step(
        x,
        conv_weight=core.weight,
        conv_bias=core.bias,
        conv_state=windows,
        activation=activation_of(core.activation),
        g=g,
        beta=beta,
        z=None if z is None else z.unsqueeze(tokens),
        out=out.unsqueeze(tokens),
        **core.options(),
        **lists,
        **gated_norm,
    )
    return True


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


def _step(
    core: _Core, m: Any, rows: tuple[Tensor, Tensor, Tensor], out: Tensor, norm: Any, z: Any
) -> str | None:
    """A layer's step on rows x, g and beta, through its gated norm if it has one here.

    Returns None, or why it is the original's: before anything is written.
    """
    reason = core.refusal(rows[0])
    if reason is None and norm is not None and norm.activation not in GATE_ACTIVATIONS:
        reason = f"a norm with the activation {norm.activation!r}"
    if reason is not None:
        return reason
    count = m.num_actual_tokens
    x, g, beta = (row[:count] for row in rows)
    out = out[:count]
    if norm is None:
        if not _in_one_call(core, m, (x, g, beta), out, {"norm": False}, None):
            _run(core, m, x, g, beta, out)
        return None
    activation: Any = "sigmoid" if norm.activation == "sigmoid" else "silu"
    gated_norm = {"norm_weight": norm.weight, "norm_activation": activation, "eps": norm.eps}
    if _in_one_call(core, m, (x, g, beta), out, gated_norm, z[:count]):
        return None
    o = torch.empty_like(out)
    _run(core, m, x, g, beta, o)
    plain_rms_norm(o, norm.weight, z[:count], norm.eps, activation, out=out)
    return None


def make_head_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def run(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
            m = _metadata(module, self)
            if m is None:  # nothing to warm up: there is nothing to compile or to tune
                return None
            rows = (mixed_qkv, a, b)
            reason = _step(_head_core(module, self), m, rows, core_attn_out, None, None)
            if reason is None:
                return None
            say_once(f"{type(self).__name__}.{name}", reason)
            return original(self, mixed_qkv, b, a, core_attn_out)

        return named(run, original, name)

    return make


def make_normed_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def run(
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
            core, rows = _head_core(module, self), (mixed_qkv, a, b)
            reason = _step(core, m, rows, core_attn_out, self.norm, output_gate)
            if reason is None:
                return None
            say_once(f"{type(self).__name__}.{name}", reason)
            return original(self, mixed_qkv, b, a, output_gate, core_attn_out)

        return named(run, original, name)

    return make


def make_channel_core(module: Any) -> Callable[[Any, str], Any]:
    def make(original: Any, name: str) -> Any:
        @torch.no_grad()
        def run(
            self: Any,
            mixed_qkv: Tensor,
            g1: Tensor,
            g2: Tensor,
            beta: Tensor,
            core_attn_out: Tensor,
        ) -> Any:
            m = _metadata(module, self)
            if m is None:
                return None
            core, rows = _channel_core(module, self), (mixed_qkv, g1[0], beta[0])
            reason = _step(core, m, rows, core_attn_out[0], self.o_norm, g2)
            if reason is None:
                return None
            say_once(f"{type(self).__name__}.{name}", reason)
            return original(self, mixed_qkv, g1, g2, beta, core_attn_out)

        # Where vLLM divides its graphs around a layer, it does so around ours.
        around = getattr(module, "eager_break_during_capture", None)
        return named(run if around is None else around(run), original, name)

    return make


def make_no_warmup(original: Any, name: str) -> Any:
    def _warmup_prefill_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: what runs is compiled, and chooses without measuring."""

    return named(_warmup_prefill_kernels, original, name)


# ---- Prompts of the layer with a gate per head, where somebody calls its operator ----------------


def rule_of(module: Any) -> Any:
    """The class that vLLM makes instead of its own ``ChunkGatedDeltaRule``."""
    base: Any = module.ChunkGatedDeltaRule

    class DelticChunkGatedDeltaRule(base):  # type: ignore[misc]
        """Prompts in chunks, from and to states ``[N, HV, V, K]``."""

        def __init__(self) -> None:
            super().__init__()
            self._theirs: Any = self._forward_method
            self._forward_method: Any = self.forward_deltic

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
                    split=may_split(),
                    out=out,
                )

    DelticChunkGatedDeltaRule.name = base.__name__
    return DelticChunkGatedDeltaRule
