"""Kimi Delta Attention: the delta rule with one decay per key channel."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._base import DeltaRuleLayer, step_size_bias, whole
from ._checks import expect, expect_number
from ._norms import GatedRMSNorm


class KimiDeltaAttention(DeltaRuleLayer):
    """Kimi Delta Attention (arXiv:2510.26692), with grouped values where ``num_v_heads`` says so.

    Args:
        expand_v: the width of a value head as a multiple of ``head_dim``.
        head_dim: the width of a query or key head, up to 256.
        num_v_heads: a multiple of ``num_heads``, by default equal.
        mode: as in :class:`DeltaNet`.
        allow_neg_eigval: beta up to 2.
        safe_gate: starts ``A_log`` at 0; needs ``lower_bound``.
        lower_bound: below 0: the log decay is ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``
            with ``f = f_proj(x)``. None: ``-exp(A_log) * softplus(f + dt_bias)``.
        layer_idx: the layer's place in a cache.

    >>> import torch
    >>> from deltic.layers import KimiDeltaAttention
    >>> layer = KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=2)
    >>> o, _, _ = layer(torch.randn(2, 100, 64))
    >>> o.shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        name = "KimiDeltaAttention"
        if lower_bound is not None:
            expect_number(name, "lower_bound", lower_bound)
        is_bound = lower_bound is not None and math.isfinite(lower_bound) and lower_bound < 0
        expect(
            is_bound or (lower_bound is None and not safe_gate),
            name,
            "lower_bound",
            "a number below 0" + (" with safe_gate" if safe_gate else " or None"),
            lower_bound,
        )
        self.head_dim, self.expand_v, self.allow_neg_eigval = head_dim, expand_v, allow_neg_eigval
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        head_v_dim = whole(name, ("head_dim", head_dim), "expand_v", expand_v)
        self._set_sizes(mode, hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, layer_idx)
        self._add_projections()
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, head_v_dim, bias=False),
            nn.Linear(head_v_dim, gate_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self._add_gate_parameters(gate_dim)
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_v_dim, bias=False),
            nn.Linear(head_v_dim, self.value_dim, bias=True),
        )
        self._add_output(GatedRMSNorm(head_v_dim, norm_eps, "sigmoid"))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates uniform in [1, 16] (1 with ``safe_gate``), step sizes between 1e-3 and 1e-1."""
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        step_size_bias(self.dt_bias)

    def _rule(self, x: Tensor) -> dict[str, Any]:
        return {
            "g": self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim)),
            "gate": "softplus" if self.lower_bound is None else "bounded",
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "qk_l2norm": True,
            **self._beta(x),
        }

    def _gate(self, x: Tensor) -> Tensor:
        gate: Tensor = self.g_proj(x)
        return gate
