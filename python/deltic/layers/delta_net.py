"""DeltaNet: the delta rule without decay."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._base import DeltaRuleLayer, whole
from ._checks import expect, expect_size
from ._norms import GatedRMSNorm, RMSNorm


class DeltaNet(DeltaRuleLayer):
    """Linear attention by the delta rule (arXiv:2406.06484).

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``. With gradients, and in training, chunks run in
            any case; for a few tokens in eval the recurrent form does.
        d_model: another name of ``hidden_size``; wins if given.
        expand_k, expand_v: widths of all keys and of all values, as multiples of ``hidden_size``.
        use_beta: False: every beta is 1.
        use_gate: gates the output with ``swish(g_proj(x))``.
        allow_neg_eigval: beta up to 2.
        layer_idx: the layer's place in a cache.
        qk_activation: ``"silu"``, ``"relu"``, ``"elu"`` (plus 1) or ``"identity"``.
        qk_norm: ``"l2"``, or ``"sum"``: divides by the sum of magnitudes.
        use_output_norm: taken because models pass it; the output is always normalised.

    >>> import torch
    >>> from deltic.layers import DeltaNet
    >>> o, _, _ = DeltaNet(hidden_size=64, num_heads=2)(torch.randn(2, 100, 64))
    >>> o.shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        use_output_norm: bool = True,
    ) -> None:
        super().__init__()
        hidden_size = hidden_size if d_model is None else d_model
        expect(
            qk_activation in ("silu", "relu", "elu", "identity"),
            "DeltaNet",
            "qk_activation",
            "'silu', 'relu', 'elu' or 'identity'",
            qk_activation,
        )
        expect(qk_norm in ("l2", "sum"), "DeltaNet", "qk_norm", "'l2' or 'sum'", qk_norm)
        expect(use_output_norm, "DeltaNet", "use_output_norm", "True", use_output_norm)
        expect_size("DeltaNet", "num_heads", num_heads)
        key_dim = whole("DeltaNet", ("hidden_size", hidden_size), "expand_k", expand_k)
        value_dim = whole("DeltaNet", ("hidden_size", hidden_size), "expand_v", expand_v)
        for argument, width in (("expand_k", key_dim), ("expand_v", value_dim)):
            expected = f"a width that is a multiple of num_heads={num_heads}"
            expect(width % num_heads == 0, "DeltaNet", argument, expected, width)
        self.expand_k, self.expand_v = expand_k, expand_v
        self.use_beta, self.use_gate, self.allow_neg_eigval = use_beta, use_gate, allow_neg_eigval
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        self._set_sizes(
            mode,
            hidden_size,
            num_heads,
            None,
            key_dim // num_heads,
            value_dim // num_heads,
            layer_idx,
        )
        self._add_projections()
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self._add_convolutions(
            use_short_conv, conv_size, conv_bias, "silu" if qk_activation == "silu" else None
        )
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        norm = GatedRMSNorm if use_gate else RMSNorm
        self._add_output(norm(self.head_v_dim, norm_eps))

    def _activated_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_activation == "relu":
            q, k = q.relu(), k.relu()
        elif self.qk_activation == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.qk_norm == "sum":
            q, k = F.normalize(q, p=1, dim=-1, eps=1e-6), F.normalize(k, p=1, dim=-1, eps=1e-6)
        return q, k

    def _rule(self, x: Tensor) -> dict[str, Any]:
        rule: dict[str, Any] = {"qk_l2norm": self.qk_norm == "l2"}
        if self.use_beta:
            rule.update(self._beta(x))
        elif self.allow_neg_eigval:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            rule["beta"] = x.new_full((*x.shape[:2], self.num_heads), 2.0, dtype=dtype)
        return rule

    def _gate(self, x: Tensor) -> Tensor | None:
        return self.g_proj(x) if self.use_gate else None
