"""Gated DeltaNet in chunks."""

from typing import Any

from torch import Tensor

from ..._call import (
    check_key_width,
    check_negative_eigenvalues,
    check_sequences,
    check_tensors,
    chunk,
    make_options,
    refuse_context,
    refuse_head_first,
    refuse_unknown,
    state_layout,
    take_chunk_size,
)
from ..._surface import surface


@surface(g="B,T,HV")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet over whole sequences, differentiable.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        g: ``[B, T, HV]``, the log decay, or what ``use_gate_in_kernel`` turns into it.
        beta: ``[B, T, HV]``, values or logits.
        scale: of q, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, any float dtype.
        output_final_state: returns the last state in fp32.
        use_qk_l2norm_in_kernel: normalises q and k inside.
        use_beta_sigmoid_in_kernel: beta is a logit.
        allow_neg_eigval: beta is 2 * sigmoid of its logit.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        cu_seqlens_cpu: a copy of them on the host.
        chunk_indices: not needed here, and not read.
        cp_context: not supported.
        use_gate_in_kernel, A_log, dt_bias: g becomes ``-exp(A_log) * softplus(g + dt_bias)``.
        chunk_size: 16, 32 or 64 (default).

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, and the final state or None.
    """
    check_tensors("chunk_gated_delta_rule", q, k, v)
    if g is not None and g.dim() != 3:
        raise ValueError(
            f"`g` must have the shape [B, T, HV], got {list(g.shape)} (per channel: chunk_kda)"
        )
    state_v_first = state_layout(state_v_first, kwargs)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must have the same number of heads, got {q.shape[2]} and {k.shape[2]}"
        )
    if v.shape[2] % q.shape[2] != 0:
        raise ValueError(
            "v must have a number of value heads that is a multiple of q's heads, "
            f"got HV = {v.shape[2]} and H = {q.shape[2]}"
        )
    refuse_head_first(kwargs)
    chunk_size = take_chunk_size(kwargs, (16, 32, 64), "Gated DeltaNet")
    refuse_context(cp_context)
    check_sequences(q, cu_seqlens, initial_state)
    use_gate_in_kernel = bool(kwargs.pop("use_gate_in_kernel", False))
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    refuse_unknown("chunk_gated_delta_rule", kwargs)
    if use_gate_in_kernel:
        assert A_log is not None, "`A_log` is needed with `use_gate_in_kernel=True`, got None"
    check_negative_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    check_key_width(k)
    return chunk(
        "chunk_gated_delta_rule",
        q,
        k,
        v,
        beta=beta,
        g=g,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        options=make_options(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
        ),
    )


chunk_gdn = chunk_gated_delta_rule
