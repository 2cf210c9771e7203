"""Kimi Delta Attention token by token, from a state or from a pool of states."""

from typing import Any

import torch
from torch import Tensor

from ...._library import type_name
from ...._native import decode
from ..._call import (
    check_negative_eigenvalues,
    check_sequences,
    check_tensors,
    make_options,
    one_dtype,
    recurrent,
    refuse_unknown,
    rows,
    state_layout,
)
from ..._surface import surface


@surface(g="B,T,HV,K", beta="B,T,HV|B,T,HV,V")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention as a recurrence, differentiable.

    Arguments as in :func:`deltic.fla.ops.kda.chunk_kda`; ``beta`` may be ``[B, T, HV, V]``, one
    number per value column, and ``initial_state`` may have any float dtype.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final state (fp32) or None.
    """
    check_tensors("fused_recurrent_kda", q, k, v)
    state_v_first = state_layout(state_v_first, kwargs)
    refuse_unknown("fused_recurrent_kda", kwargs)
    check_sequences(q, cu_seqlens, initial_state)
    check_negative_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    return recurrent(
        "fused_recurrent_kda",
        q,
        k,
        v,
        beta=beta,
        g=g,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
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


_INDICES = (torch.int32, torch.int64)


def _first_slots(slots: Tensor, num_accepted_tokens: Tensor | None) -> Tensor:
    """The slot that each sequence starts from, of ``[N]`` or ``[N, tokens]`` of them."""
    table = slots[:, None] if slots.dim() == 1 else slots
    if num_accepted_tokens is None:
        return table[:, 0]
    place = num_accepted_tokens.to(torch.int64) - 1
    if place.device.type == "cpu" and bool(((place < 0) | (place >= table.shape[1])).any()):
        raise ValueError(
            f"`num_accepted_tokens` must be from 1 to the {table.shape[1]} slots of a sequence, "
            f"got {num_accepted_tokens.tolist()}"
        )
    return table.gather(1, place[:, None])[:, 0]


def _is_pool(states: Tensor) -> bool:
    """Whether the operator takes these states as they lie."""
    return states.dtype in (torch.float32, torch.bfloat16) and states.stride(-1) == 1


def _copy_of_states(
    initial_state: Tensor | None,
    read: Tensor,
    after: int,
    shape: tuple[int, ...],
    like: Tensor,
) -> Tensor:
    """A pool of the states to start from, slots 0 to N - 1, and `after` empty slots."""
    starts = torch.zeros((len(read), *shape), device=like.device)
    if initial_state is not None:
        if read.device.type == "cpu" and bool((read >= len(initial_state)).any()):
            raise ValueError(
                f"fused_recurrent_kda_fwd: ssm_state_indices: expected slots below the "
                f"{len(initial_state)} of initial_state, got {int(read.max())}"
            )
        used = read >= 0
        starts[used] = initial_state[read[used]].float()
    return torch.cat([starts, starts.new_zeros((after, *shape))])


def _written(write: Tensor, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """Which entries of a list of slots a call writes."""
    if cu_seqlens is None:
        length = torch.full((len(write),), T, device=write.device)
    else:
        length = cu_seqlens.diff()
    if write.dim() == 1:
        return (write >= 0) & (length > 0)
    return (write >= 0) & (torch.arange(write.shape[1], device=write.device) < length[:, None])


def _last_of_each(write: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A list of slots in which a slot that a sequence names again counts the last time only."""
    written = _written(write, write.shape[1], cu_seqlens)
    same = (write[:, :, None] == write[:, None, :]) & written[:, None, :]
    return torch.where(same.triu(1).any(-1), -1, write)


@surface(
    g="B,T,HV,K",
    beta="B,T,HV|B,T,HV,V",
    initial_state="slots,HV,K,V",
    ssm_state_indices="N|N,tokens",
    num_accepted_tokens="N",
)
@torch.no_grad()
def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """One or a few tokens per sequence, the states in the slots of a pool; no gradient.

    Arguments as in :func:`fused_recurrent_kda`, and:

    Args:
        initial_state: ``[slots, HV, K, V]``, fp32, bf16 or fp16.
        inplace_final_state: states go back to ``initial_state``, which is returned.
        ssm_state_indices: ``[N]``, the slot of each sequence, read and written (-1: the sequence is
            skipped); or ``[N, tokens]``, the slot of the state after each token. Sequence n starts
            from ``ssm_state_indices[n, 0]``. Absent: slot n.
        num_accepted_tokens: ``[N]``: sequence n starts from
            ``ssm_state_indices[n, num_accepted_tokens[n] - 1]``.
        out: where o goes.

    Returns:
        o, and the pool; or, with ``inplace_final_state=False``, a new tensor of states in fp32: the
        last one of each sequence or, with ``ssm_state_indices``, the one after each token,
        ``[B * T, HV, K, V]``; None without ``output_final_state``.
    """
    check_tensors("fused_recurrent_kda_fwd", q, k, v)
    for name, x in (("initial_state", initial_state), ("out", out)):
        if isinstance(x, Tensor) and not x.is_floating_point():
            found = type_name(x.dtype)
            text = f"fused_recurrent_kda_fwd: {name}: expected fp32, bf16 or fp16, got {found}"
            raise TypeError(text)
    if isinstance(num_accepted_tokens, Tensor) and num_accepted_tokens.dtype not in _INDICES:
        found = type_name(num_accepted_tokens.dtype)
        text = f"num_accepted_tokens: expected int32 or int64, got {found}"
        raise TypeError(f"fused_recurrent_kda_fwd: {text}")
    refuse_unknown("fused_recurrent_kda_fwd", kwargs)
    check_negative_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    if out is not None:
        assert out.shape == v.shape, (
            f"out must have v's shape, {list(v.shape)}, got {list(out.shape)}"
        )
    assert not inplace_final_state or initial_state is not None, (
        "`initial_state` is needed with `inplace_final_state=True`, got None"
    )
    assert num_accepted_tokens is None or ssm_state_indices is not None, (
        "`ssm_state_indices` is needed with `num_accepted_tokens`, got None"
    )
    B, T = q.shape[:2]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    slots = ssm_state_indices
    if slots is None:
        read = write = torch.arange(N, device=q.device)
    else:
        read = _first_slots(slots, num_accepted_tokens)
        write = slots if slots.dim() == 1 else _last_of_each(slots[:, :T], cu_seqlens)
    options = make_options(
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )._asdict()
    del options["output_final_state"]

    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    given = initial_state
    own_read, own_write = read, write
    takes_pool = inplace_final_state and given is not None and _is_pool(given)
    if takes_pool and given is not None:
        pool = given
    else:
        # States on the side: slot n to start from, then one per row that is kept.
        kept = B * T if slots is not None and not inplace_final_state else write.numel()
        shape = (HV, V, K) if state_v_first else (HV, K, V)
        pool = _copy_of_states(initial_state, read, kept, shape, q)
        own_read = torch.where(read < 0, -1, torch.arange(N, device=q.device))
        own_write = N + torch.arange(kept, device=q.device)
        if slots is not None and not inplace_final_state:
            # Row bos + t for token t of a sequence.
            begin = torch.arange(N, device=q.device) * T if cu_seqlens is None else cu_seqlens[:-1]
            length = torch.full_like(begin, T) if cu_seqlens is None else cu_seqlens.diff()
            token = torch.arange(T, device=q.device)
            own_write = torch.where(token < length[:, None], N + begin[:, None] + token, -1)
            own_write = torch.where(own_read[:, None] < 0, -1, own_write)
        else:
            own_write = torch.where(write < 0, -1, own_write.view(write.shape))
    q, k, values = one_dtype(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        o = decode(
            rows(q),
            rows(k),
            rows(values),
            beta=rows(beta),
            g=rows(g),
            state_pool=pool,
            read_index=rows(own_read),
            write_index=rows(own_write),
            cu_seqlens=cu_seqlens,
            **options,
        ).to(v.dtype)
    if out is not None:
        o = out.copy_(o)
    if inplace_final_state:
        if not takes_pool and given is not None:
            used = _written(write, T, cu_seqlens)
            given[write[used]] = pool[own_write[used]].to(given.dtype)
        return o, given
    return o, pool[N:] if output_final_state else None
