"""What the three layers share: checks, projections, convolutions, cache, the call itself."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._library import type_name
from .._native import decode, delta_rule, recurrent
from ._checks import expect, expect_int, expect_number, expect_size, own_words
from ._norms import GatedRMSNorm, RMSNorm
from ._packing import Packing, plan
from ._short_convolution import ShortConvolution, is_writable
from .cache import Cache, is_cache

MODES = ("chunk", "fused_recurrent")
# Tokens per sequence up to which the recurrent form is the faster one (two cores, K = V = 128 with
# 16 heads: 4 tokens 0.19 against 0.28 ms, 8 tokens 0.30 against 0.34, 16 tokens 0.48 against 0.37).
_RECURRENT_TOKENS = 8
_MAX_KEY_WIDTH = 256
_UNDECAYED = ("A_log", "dt_bias")
# What models hand down to every layer and these layers have no use for.
_IGNORED = frozenset({"cache_position", "position_ids"})


def whole(layer: str, base: tuple[str, int], argument: str, ratio: float) -> int:
    """A width, the product of another one and a ratio, as an int."""
    expect_size(layer, *base)
    expect_number(layer, argument, ratio)
    size = base[1] * ratio
    expect(math.isclose(size, round(size), rel_tol=1e-5), layer, argument, "a whole width", size)
    return round(size)


def step_size_bias(bias: Tensor) -> None:
    """Fills a gate's bias: softplus of it is log-uniform between 1e-3 and 1e-1."""
    step = torch.empty_like(bias, dtype=torch.float32)
    step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


class DeltaRuleLayer(nn.Module):
    """A token mixer around the delta rule.

    A layer says what gates and betas it has (:meth:`_rule`) and how its output is gated
    (:meth:`_gate`); the rest is the same for all of them.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    allow_neg_eigval: bool
    b_proj: nn.Linear
    o_norm: RMSNorm | GatedRMSNorm

    def _set_sizes(
        self,
        mode: str,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_k_dim: int,
        head_v_dim: int,
        layer_idx: int | None,
    ) -> None:
        """Checks and keeps what every layer has; what the operator would refuse is refused here."""
        name = type(self).__name__
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        expect(mode in MODES, name, "mode", "'chunk' or 'fused_recurrent'", mode)
        expect_size(name, "hidden_size", hidden_size)
        expect_size(name, "num_heads", num_heads)
        expect_int(name, "num_v_heads", num_v_heads)
        if layer_idx is not None:
            expect_int(name, "layer_idx", layer_idx)
            expect(layer_idx >= 0, name, "layer_idx", "at least 0", layer_idx)
        expect(
            num_v_heads >= num_heads and num_v_heads % num_heads == 0,
            name,
            "num_v_heads",
            f"a multiple of num_heads={num_heads}",
            num_v_heads,
        )
        expect(
            0 < head_k_dim <= _MAX_KEY_WIDTH,
            name,
            "head_dim",
            f"a key width of 1 to {_MAX_KEY_WIDTH}",
            head_k_dim,
        )
        expect(head_v_dim > 0, name, "expand_v", "a value width of at least 1", head_v_dim)
        self.mode, self.layer_idx = mode, layer_idx
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.key_dim, self.value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim

    def _add_projections(self) -> None:
        self.q_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)

    def _add_convolutions(
        self, use_short_conv: bool, size: int, bias: bool, qk_activation: str | None = "silu"
    ) -> None:
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, size, bias
        self._qk_activation = qk_activation
        if use_short_conv:
            expect_size(type(self).__name__, "conv_size", size)
            self.q_conv1d = ShortConvolution(self.key_dim, size, bias, qk_activation)
            self.k_conv1d = ShortConvolution(self.key_dim, size, bias, qk_activation)
            self.v_conv1d = ShortConvolution(self.value_dim, size, bias)

    def _add_gate_parameters(self, num_biases: int) -> None:
        """A_log and dt_bias in fp32."""
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_biases, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """Starts the layer's own parameters afresh; its modules have a method of that name each.

        For layers that were built on the meta device::

            layer.to_empty(device="cpu")
            for module in layer.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        """

    def _mark(self) -> None:
        """Optimisers leave parameters so marked without weight decay."""
        for name in _UNDECAYED:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    # A parameter that torch makes anew has no marks: of a layer that gets another one, moves to
    # another device or dtype, is copied or unpickled.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name in _UNDECAYED:
            self._mark()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _add_output(self, norm: RMSNorm | GatedRMSNorm) -> None:
        self.o_norm = norm
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def _rule(self, x: Tensor) -> dict[str, Any]:
        """Gate, beta and norms of the call: keyword arguments of :func:`deltic.delta_rule`."""
        raise NotImplementedError

    def _gate(self, x: Tensor) -> Tensor | None:
        """The output gate, ``[..., HV * V]``."""
        raise NotImplementedError

    def _activated_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k by heads, after the convolutions."""
        return q, k

    def _beta(self, x: Tensor) -> dict[str, Any]:
        form = "2sigmoid" if self.allow_neg_eigval else "sigmoid"
        return {"beta": self.b_proj(x), "beta_form": form}

    @own_words(
        hidden_states="x q k v g beta",
        past_key_values="state state_pool initial_state",
    )
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Mixes ``hidden_states [batch, tokens, hidden_size]``.

        Args:
            attention_mask: ``[batch, tokens]`` of 1 and 0 (padding, left or right), or longer: the
                last columns count. The output is 0 at padding.
            past_key_values: a :class:`Cache`, or one with its ``update(recurrent_state=...)`` and
                ``[layer]``; states are read from entry ``layer_idx``.
            use_cache: stores the states after the last tokens; makes a cache where none is given.
            output_attentions: there are no attention weights; only False is taken.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences in a batch of 1; then the mask has
                no effect.
            cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU, for tensors on a GPU.

        Returns:
            The output, None, and the cache.
        """
        name = type(self).__name__
        for keyword in kwargs:
            if keyword not in _IGNORED:
                raise TypeError(f"{name}: {keyword}: expected no such argument, got one")
        if use_cache not in (True, False, None):
            raise TypeError(f"{name}: use_cache: expected a bool, got {use_cache!r}")
        if output_attentions:
            raise ValueError(f"{name}: output_attentions: expected False, got {output_attentions}")
        packing = plan(
            name, hidden_states, self.hidden_size, attention_mask, cu_seqlens, cu_seqlens_cpu
        )
        self._check_dtype(name, hidden_states)
        cache: Any = Cache() if use_cache and past_key_values is None else past_key_values
        state, conv_states = self._remembered(cache, packing.sequences)

        x = packing.pack(hidden_states)
        q, k, v, next_states = self._qkv(x, conv_states, bool(use_cache), packing)
        o, state = self._attend(q, k, v, self._rule(x), state, bool(use_cache), packing)
        if use_cache:
            cache.update(
                recurrent_state=state,
                conv_state=next_states,
                layer_idx=self.layer_idx,
                offset=packing.tokens,
            )
        gate = self._gate(x)
        if gate is None:
            o = self.o_norm(o)
        else:
            o = self.o_norm(o, gate.view(o.shape))
        return packing.unpack(self.o_proj(o.flatten(-2))), None, cache

    def _check_dtype(self, name: str, x: Tensor) -> None:
        """Refuses rows of another dtype than the weights', for which torch's words name neither."""
        projection = self.q_proj
        if type(projection) is not nn.Linear or x.dtype == projection.weight.dtype:
            return  # what takes a Linear's place may well take other dtypes
        device = x.device.type
        if x.is_floating_point() and device != "meta" and torch.is_autocast_enabled(device):
            return
        raise TypeError(
            f"{name}: hidden_states: expected {type_name(projection.weight.dtype)} as the layer's "
            f"weights are (or torch.autocast), got {type_name(x.dtype)}"
        )

    def _remembered(
        self, cache: Any, sequences: int
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The states before this call: of the recurrence, and of the three convolutions."""
        nothing = None, (None, None, None)
        if cache is None:
            return nothing
        name = type(self).__name__
        if not is_cache(cache):
            raise TypeError(
                f"{name}: past_key_values: expected a deltic.layers.Cache, "
                f"got {type(cache).__name__}"
            )
        if self.layer_idx is None:
            raise ValueError(
                f"{name}: layer_idx: expected this layer's place in the cache (a constructor's "
                "argument), got None"
            )
        entry = cache[self.layer_idx] if len(cache) > self.layer_idx else None
        if entry is None or entry["recurrent_state"] is None:
            return nothing
        state, conv_states = entry["recurrent_state"], entry["conv_state"] or (None, None, None)
        if state.shape[0] != sequences:
            raise ValueError(
                f"{name}: past_key_values: expected states of {sequences} sequences, "
                f"got {state.shape[0]}"
            )
        # All of them before the first one is updated in place.
        sizes = (sequences, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        self._check_state("recurrent_state", state, sizes)
        if self.use_short_conv:
            widths = (self.key_dim, self.key_dim, self.value_dim)
            for found, width in zip(conv_states, widths, strict=True):
                if found is not None:
                    self._check_state("conv_state", found, (sequences, width, self.conv_size - 1))
        return state, conv_states

    def _check_state(self, kind: str, state: Tensor, shape: tuple[int, ...]) -> None:
        """Refuses the state of a layer of other sizes."""
        if tuple(state.shape) != shape:
            raise ValueError(
                f"{type(self).__name__}: past_key_values: expected a {kind} of shape "
                f"{list(shape)}, got {list(state.shape)}"
            )

    def _qkv(
        self, x: Tensor, states: tuple[Tensor | None, ...], use_cache: bool, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None]:
        """q, k and v by heads, and the next states of their convolutions."""
        rows = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        next_states = None
        if self.use_short_conv:
            convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            found = [
                convolution(row, state, use_cache, packing)
                for convolution, row, state in zip(convolutions, rows, states, strict=True)
            ]
            rows = [row for row, _ in found]
            next_states = tuple(state for _, state in found) if use_cache else None
        else:
            if self._qk_activation is not None:
                rows[:2] = [F.silu(row) for row in rows[:2]]
            rows[2] = F.silu(rows[2])
        q, k = (row.unflatten(-1, (self.num_heads, self.head_k_dim)) for row in rows[:2])
        v = rows[2].unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return *self._activated_qk(q, k), v, next_states

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: dict[str, Any],
        state: Tensor | None,
        use_cache: bool,
        packing: Packing,
    ) -> tuple[Tensor, Tensor | None]:
        """The operator, in chunks or token by token; a state in place where it can be."""
        rule["cu_seqlens"], rule["cu_seqlens_cpu"] = packing.cu_seqlens, packing.cu_seqlens_cpu
        is_short = q.shape[0] * q.shape[1] <= _RECURRENT_TOKENS * packing.sequences
        in_chunks = torch.is_grad_enabled() or self.training
        in_chunks = in_chunks or (self.mode == "chunk" and not is_short)
        if use_cache and state is not None and is_writable(state):
            if in_chunks:
                return delta_rule(q, k, v, state_pool=state, **rule)[0], state
            return decode(q, k, v, state_pool=state, **rule), state
        operator = delta_rule if in_chunks else recurrent
        return operator(q, k, v, initial_state=state, output_final_state=use_cache, **rule)
