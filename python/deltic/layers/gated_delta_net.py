"""Gated DeltaNet: the delta rule with one decay per head."""

from typing import Any

import torch
from torch import Tensor, nn

from ._base import DeltaRuleLayer, step_size_bias, whole
from ._checks import expect
from ._norms import GATE_ACTIVATIONS, GatedRMSNorm, RMSNorm


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet (arXiv:2412.06464), with grouped values where ``num_v_heads`` says so.

    Args:
        expand_v: the width of a value head as a multiple of ``head_dim``.
        head_dim: the width of a query or key head, up to 256.
        num_v_heads: a multiple of ``num_heads``, by default equal: value head h reads the query
            and key head ``h // (num_v_heads // num_heads)``.
        mode: as in :class:`DeltaNet`.
        use_gate: gates the output with ``output_gate_activation(g_proj(x))``.
        allow_neg_eigval: beta up to 2.
        layer_idx: the layer's place in a cache.
        output_gate_activation: ``"swish"`` (also called ``"silu"``) or ``"sigmoid"``.

    >>> import torch
    >>> from deltic.layers import GatedDeltaNet
    >>> layer = GatedDeltaNet(hidden_size=64, head_dim=16, num_heads=2, num_v_heads=4)
    >>> o, _, _ = layer(torch.randn(2, 100, 64))
    >>> o.shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
    ) -> None:
        super().__init__()
        expect(
            output_gate_activation in GATE_ACTIVATIONS,
            "GatedDeltaNet",
            "output_gate_activation",
            "'swish', 'silu' or 'sigmoid'",
            output_gate_activation,
        )
        self.head_dim, self.expand_v = head_dim, expand_v
        self.use_gate, self.allow_neg_eigval = use_gate, allow_neg_eigval
        head_v_dim = whole("GatedDeltaNet", ("head_dim", head_dim), "expand_v", expand_v)
        self._set_sizes(mode, hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, layer_idx)
        self._add_projections()
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self._add_gate_parameters(self.num_v_heads)
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self._add_output(GatedRMSNorm(head_v_dim, norm_eps, output_gate_activation))
        else:
            self._add_output(RMSNorm(head_v_dim, norm_eps))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates uniform in (0, 16], and step sizes between 1e-3 and 1e-1."""
        self.A_log.uniform_(0, 16).clamp_(min=1e-6).log_()
        step_size_bias(self.dt_bias)

    def _rule(self, x: Tensor) -> dict[str, Any]:
        return {
            "g": self.a_proj(x),
            "gate": "softplus",
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "qk_l2norm": True,
            **self._beta(x),
        }

    def _gate(self, x: Tensor) -> Tensor | None:
        return self.g_proj(x) if self.use_gate else None
