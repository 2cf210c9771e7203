"""DeltaNet token by token."""

from torch import Tensor

from ..._call import check_sequences, check_tensors, make_options, recurrent
from ..._surface import surface


@surface(beta="B,T,HV|B,T,HV,V")
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet as a recurrence, differentiable.

    Arguments as in :func:`deltic.fla.ops.delta_rule.chunk_delta_rule`; ``beta`` may be absent (1)
    or ``[B, T, HV, V]``, one number per value column.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final state (fp32) or None.
    """
    check_tensors("fused_recurrent_delta_rule", q, k, v)
    check_sequences(q, cu_seqlens, initial_state)
    if scale is not None:
        assert scale > 0, f"scale must be positive, got {scale}"
    return recurrent(
        "fused_recurrent_delta_rule",
        q,
        k,
        v,
        beta=beta,
        g=None,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        options=make_options(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        ),
    )
