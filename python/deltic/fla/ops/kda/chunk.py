"""Kimi Delta Attention in chunks."""

from typing import Any

import torch
from torch import Tensor

from ...._native import Checkpoints
from ..._call import (
    check_key_width,
    check_negative_eigenvalues,
    check_sequences,
    check_tensors,
    chunk,
    make_options,
    refuse_context,
    refuse_unknown,
    state_layout,
    take_chunk_size,
)
from ..._surface import surface
from ..utils.index import (
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
)

# A gate inside of it keeps every product of exponentials of a block of 16 tokens in fp32's range.
SAFE_LOWER_BOUND = -5.0


def _chunk_starts(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    state_v_first: bool,
    use_graph: bool,
) -> Checkpoints:
    """Checkpoints at the start of every chunk, in the order of the chunks.

    With ``use_graph`` their number is the most chunks that so many tokens and sequences can have,
    and nothing is read on the host; the rest stays 0.
    """
    B, T, _, K = q.shape
    if cu_seqlens is None:
        cu_seqlens, use_graph = torch.arange(B + 1, device=q.device) * T, True
        slots = B * -(-T // chunk_size)
    else:
        slots = -(-T // chunk_size) + len(cu_seqlens) - 2
    if use_graph:
        places, first = prepare_chunk_indices_static(cu_seqlens, chunk_size, slots)
    else:
        places = prepare_chunk_indices(cu_seqlens, chunk_size)
        first = prepare_chunk_offsets(cu_seqlens, chunk_size)
    slots, V = len(places), v.shape[-1]
    states = torch.zeros(
        (slots, v.shape[2], *((V, K) if state_v_first else (K, V))),
        device=q.device,
        dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32,
    )
    index = torch.arange(slots, device=q.device, dtype=places.dtype)
    index = torch.where(places[:, 0] >= 0, index, -1)
    return Checkpoints(first, places[:, 1] * chunk_size, index, states)


@surface(g="B,T,HV,K")
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, differentiable.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        g: ``[B, T, HV, K]``, the log decay, or what ``use_gate_in_kernel`` turns into it.
        beta: ``[B, T, HV]``, values or logits.
        scale: of q, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` in fp32.
        output_final_state: returns the last state in fp32.
        use_qk_l2norm_in_kernel: normalises q and k inside.
        use_gate_in_kernel: g becomes ``-exp(A_log) * softplus(g + dt_bias)``, or with a
            ``lower_bound`` ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: beta is a logit.
        allow_neg_eigval: beta is 2 * sigmoid of its logit.
        safe_gate: promises log decays in [-5, 0). Any decay is safe here: it is checked against
            ``lower_bound`` and changes nothing.
        lower_bound: of the bounded gate.
        disable_recompute: keeps everything for the gradients instead of computing it again.
        return_intermediate_states: also returns h, the states at the start of each chunk, in k's
            dtype, ``[B, chunks, HV, K, V]``. They have no gradient, so none may be asked for.
        state_v_first: states are ``[N, HV, V, K]``, h likewise.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        cu_seqlens_cpu: a copy of them on the host.
        cp_context: not supported.
        use_graph, max_num_seqs: ``cu_seqlens`` has ``max_num_seqs + 1`` entries, empty sequences at
            its end included, so that a graph can be replayed with other lengths; h has room for as
            many chunks as there can be.
        A_log, dt_bias: of the gate, HV and HV * K numbers.
        chunk_size: 16, 32 or 64 (default).

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, the final state or None, and h where it was asked for.
    """
    check_tensors("chunk_kda", q, k, v)
    state_v_first = state_layout(state_v_first, kwargs)
    refuse_context(cp_context)
    check_sequences(q, cu_seqlens, initial_state)
    if initial_state is not None:
        assert initial_state.dtype in (torch.float32, torch.float64), (
            f"initial_state must be in float32, got {initial_state.dtype}"
        )
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError(
            "`A_log` is needed with `use_gate_in_kernel=True` and no `lower_bound`, got None"
        )
    chunk_size = take_chunk_size(kwargs, (16, 32, 64), "KDA")
    refuse_unknown("chunk_kda", kwargs)
    if safe_gate and use_gate_in_kernel:
        if lower_bound is None:
            raise ValueError(
                "`lower_bound` is needed with `safe_gate=True` and `use_gate_in_kernel=True`"
            )
        if not SAFE_LOWER_BOUND <= lower_bound < 0:
            raise ValueError(
                f"`lower_bound` must be in the safe range [{SAFE_LOWER_BOUND:g}, 0), "
                f"got {lower_bound}"
            )
    check_negative_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    assert q.shape == k.shape, (
        f"q and k must have the same shape, got {list(q.shape)} and {list(k.shape)}"
    )
    check_key_width(k)
    B, T, H, K = q.shape
    HV = v.shape[2]
    assert HV % H == 0, (
        "v must have a number of value heads that is a multiple of q's heads, "
        f"got HV = {HV} and H = {H}"
    )
    for name, x, shape in (("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        assert x.shape == shape, f"{name} must have the shape {list(shape)}, got {list(x.shape)}"
    if use_graph and cu_seqlens is not None:
        # A graph is replayed with other lengths than the ones on the host now.
        cu_seqlens_cpu = None
        sequences = len(cu_seqlens) - 1
        assert max_num_seqs is None or sequences == max_num_seqs, (
            f"`cu_seqlens` must be padded with empty sequences to `max_num_seqs` + 1 entries, got "
            f"{sequences} sequences with max_num_seqs = {max_num_seqs}"
        )
    checkpoints = None
    if return_intermediate_states:
        inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
        assert not torch.is_grad_enabled() or not any(
            x is not None and x.requires_grad for x in inputs
        ), "`return_intermediate_states` is for inference: the states have no gradient"
        checkpoints = _chunk_starts(q, v, cu_seqlens, chunk_size, state_v_first, use_graph)
    o, final_state = chunk(
        "chunk_kda",
        q,
        k,
        v,
        beta=beta,
        g=g,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        recompute=not disable_recompute,
        checkpoints=checkpoints,
        options=make_options(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
        ),
    )
    if checkpoints is None:
        return o, final_state
    h = checkpoints.states.to(k.dtype)
    batches = B if cu_seqlens is None else 1
    return o, final_state, h.reshape(batches, len(h) // max(batches, 1), *h.shape[1:])
