"""The recurrence and its chunked form in plain torch, for all three kinds of gate.

They are written to be read and compared with, not to be fast: fp32 (fp64 for fp64), any device,
differentiable by autograd.
"""

import torch
from torch import Tensor

from ._call import wide


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """q, k, v, beta, g ``[B, HV, T, ...]`` (g per channel or with one) and the state."""
    dtype = wide(q)
    group = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = (q.to(dtype) * scale).repeat_interleave(group, 2).transpose(1, 2)
    k = k.to(dtype).repeat_interleave(group, 2).transpose(1, 2)
    v, beta = v.to(dtype).transpose(1, 2), beta.to(dtype).transpose(1, 2)
    if beta.dim() == 3:
        beta = beta.unsqueeze(-1)
    if g is None:
        g = torch.zeros_like(k[..., :1])
    else:
        g = g.to(dtype).transpose(1, 2)
        if g.dim() == 3:
            g = g.unsqueeze(-1)
    if initial_state is None:
        state = k.new_zeros((*k.shape[:2], k.shape[-1], v.shape[-1]))
    else:
        state = initial_state.to(dtype)
    return q, k, v, beta, g, state


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token. Returns ``o [B, T, HV, V]`` and the last state."""
    q, k, v, beta, g, state = _prepared(q, k, v, beta, g, scale, initial_state)
    o = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        key = k[:, :, t].unsqueeze(-1)
        u = beta[:, :, t] * (v[:, :, t] - (state * key).sum(-2))
        state = state + key * u.unsqueeze(-2)
        o.append((state * q[:, :, t].unsqueeze(-1)).sum(-2))
    return torch.stack(o, 1) if o else v.transpose(1, 2), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk. Returns ``o [B, T, HV, V]`` and the last state."""
    q, k, v, beta, g, state = _prepared(q, k, v, beta, g, scale, initial_state)
    o = []
    for begin in range(0, q.shape[2], chunk_size):
        part = slice(begin, begin + chunk_size)
        key, G = k[:, :, part], g[:, :, part].cumsum(2)
        past = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=q.device).tril()
        # exp(G_i - G_j) for j <= i: the others are masked before, where they may overflow.
        gap = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~past[..., None], -torch.inf)
        pairs = key.unsqueeze(2) * gap.exp()
        scores = (q[:, :, part].unsqueeze(3) * pairs).sum(-1)
        lower = (beta[:, :, part] * (key.unsqueeze(3) * pairs).sum(-1)).tril(-1)
        eye = torch.eye(key.shape[2], dtype=q.dtype, device=q.device)
        correction = v[:, :, part] - (key * G.exp()) @ state
        u = torch.linalg.solve_triangular(
            eye + lower, beta[:, :, part] * correction, upper=False, unitriangular=True
        )
        o.append((q[:, :, part] * G.exp()) @ state + scores @ u)
        last = G[:, :, -1:]
        state = state * last.exp().mT + (key * (last - G).exp()).mT @ u
    return torch.cat(o, 2).transpose(1, 2) if o else v.transpose(1, 2), state
