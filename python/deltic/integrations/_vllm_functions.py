"""Functions that other layers of vLLM call: the same arguments, on deltic's operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._native import decode, delta_rule
from ._serving import (
    conv_drafts,
    conv_prefill,
    conv_refusal,
    conv_step,
    gate_options,
    refusal,
    split_rows,
    with_fallback,
)
from ._vllm_core import FORM, NULL, may_split

K3 = "vllm.models.kimi_k3.nvidia.kda"
K3_OPS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GLM = "vllm.models.glm5next.common.kda"
BAILING = "vllm.model_executor.models.bailing_moe_v3"

# ---- Functions of the other layers with a gate per channel ---------------------------------------


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
        **FORM,
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
        **FORM,
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
        split=may_split(),
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


# ---- Convolutions --------------------------------------------------------------------------------


def _conv_refusal(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor | None = None,
    activation: Any = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = NULL,
    **_: Any,
) -> str | None:
    if conv_states is None:
        return "no pool"
    if x.dim() != 2 or x.stride(0) != 1:
        return f"rows of strides {tuple(x.stride())}"
    if pad_slot_id != -1 or null_block_id not in (None, NULL):
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
    null_block_id: int | None = NULL,
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
        null_slot=-1 if null_block_id is None else NULL,
    ).transpose(0, 1)


def _conv_update_refusal(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    activation: Any = None,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    null_block_id: int | None = NULL,
    **_: Any,
) -> str | None:
    if x.dim() != 2 or x.stride(1) != 1:
        return f"rows of shape {tuple(x.shape)} and strides {tuple(x.stride())}"
    if conv_state_indices is None or conv_state_indices.dim() != 1:
        return "no list of slots"
    if null_block_id not in (None, NULL):
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
    null_block_id: int | None = NULL,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    options: dict[str, Any] = {
        "state": conv_state,
        "index": conv_state_indices,
        "activation": activation,
        "null_slot": -1 if null_block_id is None else NULL,
        "out": out,
    }
    if query_start_loc is None:
        return conv_step(x, weight, bias, **options)
    cu_seqlens = query_start_loc[: conv_state_indices.shape[0] + 1]
    return conv_drafts(
        x, weight, bias, accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, **options
    )


# ---- Which function of which module --------------------------------------------------------------


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


_OF_CHUNKS = (
    *("q", "k", "v", "scale", "initial_state", "output_final_state"),
    *("use_qk_l2norm_in_kernel", "cu_seqlens"),
)


@dataclass(frozen=True)
class Function:
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
) -> Function:
    plain = getattr(ours, "__wrapped__", ours)
    return Function(name, ours, refuses, _arguments(plain), note)


_CONVOLUTIONS = (
    _by_arguments("causal_conv1d_fn", _conv, _conv_refusal, "deltic.causal_conv1d"),
    _by_arguments(
        "causal_conv1d_update", _conv_update, _conv_update_refusal, "deltic.causal_conv1d_update"
    ),
)
_K3_GATE = ("raw_g", "raw_beta", "A_log", "g_bias", "lower_bound", "out")
_GLM_GATE = ("raw_g", "beta", "A_log", "g_bias", "safe_gate", "lower_bound")
FUNCTIONS: dict[str, tuple[Function, ...]] = {
    K3: _CONVOLUTIONS,
    K3_OPS: (
        _by_arguments("fused_recurrent_kda", _k3_recurrent, _pooled_refusal, "deltic.decode"),
        _by_arguments(
            "fused_recurrent_kda_packed_decode", _k3_packed, _k3_packed_refusal, "deltic.decode"
        ),
        Function(
            "chunk_kda_with_fused_gate",
            _k3_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, *_K3_GATE),
            "deltic.delta_rule",
        ),
    ),
    GLM: (
        *_CONVOLUTIONS,
        _by_arguments("fused_recurrent_kda", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        Function(
            "chunk_kda_with_fused_gate",
            _glm_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, *_GLM_GATE),
            "deltic.delta_rule",
        ),
    ),
    BAILING: (
        *_CONVOLUTIONS,
        _by_arguments("fused_recurrent_kda", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        _by_arguments("fused_recurrent_kda_fwd", _glm_recurrent, _pooled_refusal, "deltic.decode"),
        Function(
            "chunk_kda",
            _bailing_chunks,
            _chunk_refusal,
            (*_OF_CHUNKS, "g", "beta", "safe_gate", "lower_bound"),
            "deltic.delta_rule",
        ),
    ),
}
