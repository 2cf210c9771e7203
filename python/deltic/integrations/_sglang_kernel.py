"""The kernels of SGLang's backend: decode, prompts and drafted tokens on that server's pools."""

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._native import decode, delta_rule
from ._patch import say_once
from ._serving import gate_options, key_heads, refusal, split_rows

LINEAR = "sglang.srt.layers.attention.linear"
GDN, KDA = f"{LINEAR}.gdn_backend", f"{LINEAR}.kda_backend"
_CHUNK = 64  # tokens between two states that SGLang counts by
_MOST_TREE_TOKENS = 16


class Raw(NamedTuple):
    """Rows of a gate before softplus, with its parameters: what takes them computes it inside."""

    rows: Tensor
    options: dict[str, Any]


def settings(name: str) -> Any:
    """A group of the server's settings; None where no server runs, as in tests."""
    try:
        return getattr(importlib.import_module("sglang.srt.runtime_context"), name)()
    except Exception:  # its own errors, by version, for settings nobody has made
        return None


def may_split() -> Any:
    """Whether long prompts may be divided by what else is in the batch."""
    group = getattr(settings("get_exec"), "deterministic", None)
    return "off" if getattr(group, "enable_deterministic_inference", False) else "auto"


# ---- The kernels ---------------------------------------------------------------------------------


def kernel_class() -> Any:
    """The class of the kernels: SGLang's base class is there when a server is."""
    base = importlib.import_module(f"{LINEAR}.kernels.kernel_backend").LinearAttnKernelBase
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
                if isinstance(g, Raw):
                    gate = importlib.import_module(GDN).fused_gdn_gating
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
            if isinstance(g, Raw):
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
                split=may_split(),
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
    module = importlib.import_module(f"{LINEAR}.kernels.{kind}_triton")
    theirs = module.TritonKDAKernel if per_channel else module.TritonGDNKernel
    return kernel_class()(per_channel, theirs())
