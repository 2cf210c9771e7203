"""The states that pass from chunk to chunk, and their gradients. Cumulative gates in base 2."""

import torch
from torch import Tensor

from ..._call import check_key_width, wide
from ..._layout import Layout, Passage
from ..._surface import surface


def _decay(layout: Layout, g: Tensor | None, gk: Tensor | None) -> Tensor | None:
    """What a state is multiplied with in every chunk, ``[chunks + 1, HV, K or 1, 1]``."""
    found = None
    for gate in (g, gk):
        if gate is not None:
            rows = layout.split(gate.unsqueeze(-1) if gate.dim() == 3 else gate)
            last = torch.exp2(layout.last(rows)).unsqueeze(-1)
            found = last if found is None else found * last
    return found


@surface(ahead=True, g="B,T,HV")
def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The states at the start of every chunk: ``S <- decay S + (k 2^(G_last - G))^T v_new``.

    Per chunk ``v_new = u - w S``. Everything is summed in fp32, and differentiable.

    Args:
        k: ``[B, T, H, K]``; with ``gk`` the rows ``kg [B, T, HV, K]``, which carry their gate.
        w, u: ``[B, T, HV, K]`` and ``[B, T, HV, V]``, the WY pair.
        g: the cumulative gate per head, ``[B, T, HV]``.
        gk: the cumulative gate per channel, ``[B, T, HV, K]``.
        initial_state: ``[N, HV, K, V]``.
        output_final_state: returns the last state in fp32.
        chunk_size: a power of 2.
        save_new_value: returns v_new.
        state_v_first: states are ``[..., V, K]``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        cu_seqlens_cpu: a copy of them on the host.
        chunk_indices, chunk_offsets: of the chunks. With both of them nothing is read on the host.

    Returns:
        ``h [B, chunks, HV, K, V]`` in k's dtype, v_new like u or None, and the final state or None.
    """
    check_key_width(k)
    HV, V = u.shape[2:]
    layout = Passage(
        (k.shape[0], k.shape[1]),
        k.device,
        chunk_size,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_indices,
        chunk_offsets,
    )
    keys, pull, values = layout.split(k, HV), layout.split(w), layout.split(u)
    if g is not None:
        keys = keys * layout.to_end(layout.split(g.unsqueeze(-1)))
    decay = _decay(layout, g, gk)
    if initial_state is None:
        state = keys.new_zeros(layout.sequences, HV, k.shape[-1], V)
    else:
        state = initial_state.to(keys.dtype)[layout.order]
        state = state.mT if state_v_first else state
    h = keys.new_zeros(layout.chunks + 1, HV, k.shape[-1], V)
    fresh = torch.zeros_like(values)
    ends = []
    for at in layout.steps:
        ends.append(state[len(at) :])
        state = state[: len(at)]
        h[at] = state
        new = values[at] - pull[at] @ state
        fresh[at] = new
        state = (state if decay is None else decay[at] * state) + keys[at].mT @ new
    final_state = None
    if output_final_state:
        state = torch.cat([state, *reversed(ends)])[layout.order.argsort()]
        final_state = (state.mT if state_v_first else state).contiguous()
    return (
        layout.to_states(h, state_v_first, k.dtype),
        layout.join(fresh, u.dtype) if save_new_value else None,
        final_state,
    )


@surface(ahead=True, g="B,T,HV")
@torch.no_grad()
def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    h0: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_graph: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of the states after every chunk, from the last chunk to the first.

    Per chunk ``dv <- dv + 2^(G_last - G) (k dS)``, and
    ``dS <- decay dS + scale (q 2^G)^T do - w^T dv``. Everything is summed in fp32.

    Args:
        q, k: ``[B, T, H, K]``; with ``gk`` the rows ``qg`` and ``kg``, which carry their gate.
        w: ``[B, T, HV, K]``.
        do: ``[B, T, HV, V]``, the gradient of o.
        dv: ``[B, T, HV, V]``, the gradient of v_new inside of the chunk.
        h0: the initial state, of which nothing but its presence and shape is needed.
        dht: the gradient of the final state, as ``h0``.
        scale: of q, by default ``K ** -0.5``.
        use_graph: with ``chunk_indices`` and ``chunk_offsets`` nothing is read on the host anyway.
        g, gk, state_v_first, cu_seqlens, chunk_size, chunk_indices, chunk_offsets: as in
            :func:`chunk_gated_delta_rule_fwd_h`.

    Returns:
        ``dh [B, chunks, HV, K, V]`` in q's dtype, the gradient of the initial state in fp32 (None
        without one), and dv.
    """
    check_key_width(k)
    HV, V = do.shape[2:]
    K = q.shape[-1]
    layout = Passage(
        (q.shape[0], q.shape[1]),
        q.device,
        chunk_size,
        cu_seqlens,
        None,
        chunk_indices,
        chunk_offsets,
    )
    factor = K**-0.5 if scale is None else scale
    queries, keys = factor * layout.split(q, HV), layout.split(k, HV)
    pull, outer, values = layout.split(w), layout.split(do), layout.split(dv)
    if g is not None:
        G = layout.split(g.unsqueeze(-1))
        queries, keys = queries * torch.exp2(G), keys * layout.to_end(G)
    decay = _decay(layout, g, gk)
    if dht is None:
        ends = queries.new_zeros(layout.sequences, HV, K, V)
    else:
        ends = dht.to(queries.dtype)[layout.order]
        ends = ends.mT if state_v_first else ends
    dh = queries.new_zeros(layout.chunks + 1, HV, K, V)
    found = torch.zeros_like(values)
    state = ends[:0]
    for at in reversed(layout.steps):
        state = torch.cat([state, ends[len(state) : len(at)]])
        dh[at] = state
        new = values[at] + keys[at] @ state
        found[at] = new
        state = state if decay is None else decay[at] * state
        state = state + queries[at].mT @ outer[at] - pull[at].mT @ new
    d_initial = None
    if h0 is not None:
        state = torch.cat([state, ends[len(state) :]])[layout.order.argsort()]
        d_initial = (state.mT if state_v_first else state).to(wide(q)).contiguous()
    return layout.to_states(dh, state_v_first, q.dtype), d_initial, layout.join(found, dv.dtype)
