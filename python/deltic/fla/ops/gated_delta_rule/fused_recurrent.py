"""Gated DeltaNet token by token."""

from typing import Any

from torch import Tensor

from ...._blocks import gate
from ..._call import (
    check_negative_eigenvalues,
    check_sequences,
    check_tensors,
    make_options,
    recurrent,
    refuse_unknown,
    rows,
    state_layout,
    wide,
)
from ..._surface import surface


@surface(g="B,T,HV", beta="B,T,HV|B,T,HV,V")
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet as a recurrence, differentiable.

    Arguments as in :func:`deltic.fla.ops.gated_delta_rule.chunk_gated_delta_rule`, and:

    Args:
        g: ``[B, T, HV]``, a log decay of the whole state.
        gk: ``[B, T, HV, K]``, a log decay per key channel.
        gv: ``[B, T, HV, V]``, a log decay per value column. All three may be given: they multiply.
        beta: absent (1), ``[B, T, HV]`` or ``[B, T, HV, V]``.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final state (fp32) or None.
    """
    check_tensors("fused_recurrent_gated_delta_rule", q, k, v)
    state_v_first = state_layout(state_v_first, kwargs)
    refuse_unknown("fused_recurrent_gated_delta_rule", kwargs)
    check_sequences(q, cu_seqlens, initial_state)
    if use_gate_in_kernel:
        for name, x in (("A_log", A_log), ("g", g)):
            if x is None:
                raise ValueError(f"`{name}` is needed with `use_gate_in_kernel=True`, got None")
    check_negative_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    if gk is not None and g is not None:
        # One decay per channel is the sum of both logs.
        if use_gate_in_kernel:
            g = gate(rows(g), gate="softplus", A_log=A_log, dt_bias=dt_bias)
            use_gate_in_kernel = False
        g = g.to(wide(g)).unsqueeze(-1) + gk
    elif gk is not None:
        g = gk
    return recurrent(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        beta=beta,
        g=g,
        gv=rows(gv),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
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


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
