"""The outputs of chunks and the gradients inside of them; cumulative gates per head, in base 2."""

import torch
from torch import Tensor

from ..._layout import Layout
from ..._surface import surface


class _Chunks:
    """q and k by chunks, their gate, and the scores ``(q_i . k_j) 2^(G_i - G_j)`` for j <= i."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        heads: int,
        g: Tensor | None,
        g_gamma: Tensor | None,
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_size: int,
        chunk_indices: Tensor | None,
    ) -> None:
        self.layout = Layout(
            (k.shape[0], k.shape[1]),
            k.device,
            chunk_size,
            cu_seqlens,
            chunk_indices=chunk_indices,
        )
        self.scale = k.shape[-1] ** -0.5 if scale is None else scale
        self.q, self.k = self.layout.split(q, heads), self.layout.split(k, heads)
        self.G: Tensor | None = None
        if g is not None:
            self.G = self.layout.split(g.unsqueeze(-1))
        if g_gamma is not None:
            place = torch.arange(1, chunk_size + 1, device=k.device)
            steady = (g_gamma.to(self.q.dtype)[:, None] * place)[None, ..., None]
            steady = steady * self.layout.inside[:, None, :, None]
            self.G = steady if self.G is None else self.G + steady
        # What a token may see: selected before the exponential, which is not finite elsewhere.
        causal = torch.ones(chunk_size, chunk_size, device=k.device, dtype=torch.bool).tril()
        self.sees = (causal & self.layout.inside[:, :, None])[:, None]

    def decay(self) -> Tensor:
        """``2^(G_i - G_j)`` where i sees j, else 0."""
        if self.G is None:
            return self.sees.to(self.q.dtype)
        gaps = self.G - self.G.mT
        return torch.exp2(gaps.masked_fill(~self.sees, -torch.inf))

    def scores(self) -> Tensor:
        """``[chunks + 1, HV, C, C]``, with the scale."""
        return self.scale * (self.q @ self.k.mT) * self.decay()

    def from_start(self) -> Tensor | float:
        """``2^G``."""
        return 1.0 if self.G is None else torch.exp2(self.G)

    def to_end(self) -> Tensor | float:
        """``2^(G_last - G)``."""
        return 1.0 if self.G is None else self.layout.to_end(self.G)

    def per_group(self, x: Tensor, like: Tensor) -> Tensor:
        """The sum over the value heads of each head of q and k, ``[B, T, H, K]``."""
        return self.layout.join(x.unflatten(1, (like.shape[2], -1)).sum(2), like.dtype)


@surface(ahead=True, g="B,T,HV")
def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """``o = scale (2^G q h + scores v)`` per chunk, differentiable.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, the v_new of :func:`chunk_gated_delta_rule_fwd_h`.
        h: ``[B, chunks, HV, K, V]``, the states at the start of every chunk.
        g: the cumulative gate, ``[B, T, HV]``.
        g_gamma: a gate that is the same for every token, ``[HV]``, not cumulative.
        scale: by default ``K ** -0.5``.
        state_v_first: h is ``[B, chunks, HV, V, K]``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        chunk_size: a power of 2.
        chunk_indices: of the chunks, where they are known.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, summed in fp32; 0 in rows of no sequence.
    """
    x = _Chunks(q, k, v.shape[2], g, g_gamma, scale, cu_seqlens, chunk_size, chunk_indices)
    states = x.layout.states(h, state_v_first)
    o = x.scale * x.from_start() * (x.q @ states) + x.scores() @ x.layout.split(v)
    return x.layout.join(o, v.dtype)


@surface(ahead=True, g="B,T,HV")
@torch.no_grad()
def chunk_bwd_dv(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    dh: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """The gradient of v: :func:`chunk_bwd_dv_local` and ``2^(G_last - G) k dh``.

    ``dh`` has the gradients of the states after every chunk; other arguments as in
    :func:`chunk_fwd_o`. The result is like do.
    """
    x = _Chunks(q, k, do.shape[2], g, g_gamma, scale, cu_seqlens, chunk_size, chunk_indices)
    dv = x.to_end() * (x.k @ x.layout.states(dh, state_v_first))
    return x.layout.join(dv + x.scores().mT @ x.layout.split(do), do.dtype)


@surface(ahead=True, g="B,T,HV")
@torch.no_grad()
def chunk_bwd_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    A: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """The gradient that v gets inside of its chunk: ``scores^T do``, like do.

    ``A [B, T, HV, chunk_size]`` takes the place of the scores, scale and gates included; other
    arguments as in :func:`chunk_fwd_o`.
    """
    x = _Chunks(q, k, do.shape[2], g, g_gamma, scale, cu_seqlens, chunk_size, chunk_indices)
    scores = x.scores() if A is None else x.layout.split(A).masked_fill(~x.sees, 0)
    return x.layout.join(scores.mT @ x.layout.split(do), do.dtype)


@surface(ahead=True, g="B,T,HV")
@torch.no_grad()
def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, w and of the natural cumulative gate.

    Args:
        v: ``[B, T, HV, V]``, v_new.
        do: ``[B, T, HV, V]``.
        h, dh: ``[B, chunks, HV, K, V]``, states at the start of every chunk, and the gradients of
            those at its end.
        w: asks for the gradient of w, ``-dv h^T``; needs ``dv [B, T, HV, V]``, that of v_new.
        q, k, g, g_gamma, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices: as in
            :func:`chunk_fwd_o`.

    Returns:
        dq and dk ``[B, T, H, K]`` in their tensors' dtypes, dw like w (None without w), and dG
        ``[B, T, HV]`` in fp32 (None without g).
    """
    if w is not None and dv is None:
        raise ValueError("`dv` is needed for the gradient of `w`, got None")
    x = _Chunks(q, k, v.shape[2], g, g_gamma, scale, cu_seqlens, chunk_size, chunk_indices)
    layout = x.layout
    values, outer = layout.split(v), layout.split(do)
    states, ahead = layout.states(h, state_v_first), layout.states(dh, state_v_first)
    d_scores = x.scale * (outer @ values.mT) * x.decay()
    from_states = x.scale * x.from_start() * (outer @ states.mT)
    to_states = x.to_end() * (values @ ahead.mT)
    dq = from_states + d_scores @ x.k
    dk = to_states + d_scores.mT @ x.q
    dw = dG = None
    if w is not None and dv is not None:
        dw = layout.join(-(layout.split(dv) @ states.mT), w.dtype)
    if g is not None and x.G is not None:
        # A token's score with itself has no gate: its two terms would cancel, but for rounding.
        pairs = (d_scores * (x.q @ x.k.mT)).tril(-1)
        passed = (to_states * x.k).sum(-1)
        rows = (from_states * x.q).sum(-1) + pairs.sum(-1) - pairs.sum(-2) - passed
        end = torch.exp2(layout.last(x.G)).squeeze(-1) * (states * ahead).sum((-1, -2))
        rows = rows + layout.is_last[:, None] * (end + passed.sum(-1))[..., None]
        dG = layout.join(rows.unsqueeze(-1), rows.dtype).squeeze(-1)
    return x.per_group(dq, q), x.per_group(dk, k), dw, dG
