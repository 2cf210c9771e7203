"""DeltaNet in chunks."""

from typing import Any

from torch import Tensor

from ..._call import (
    check_key_width,
    check_sequences,
    check_tensors,
    chunk,
    make_options,
    refuse_head_first,
    refuse_unknown,
    take_chunk_size,
)
from ..._surface import surface


@surface()
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet over whole sequences, differentiable.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        beta: ``[B, T, HV]``.
        scale: of q, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``.
        output_final_state: returns the last state in fp32.
        use_qk_l2norm_in_kernel: normalises q and k inside.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences.
        cu_seqlens_cpu: a copy of them on the host.
        chunk_size: 16, 32 or 64 (default).

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, and the final state or None.
    """
    check_tensors("chunk_delta_rule", q, k, v)
    assert q.dtype == k.dtype == v.dtype, (
        f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    )
    assert beta.dim() == 3, f"beta must have the shape [B, T, H], got {list(beta.shape)}"
    refuse_head_first(kwargs)
    chunk_size = take_chunk_size(kwargs, (16, 32, 64), "DeltaNet")
    refuse_unknown("chunk_delta_rule", kwargs)
    check_sequences(q, cu_seqlens, initial_state)
    check_key_width(k)
    return chunk(
        "chunk_delta_rule",
        q,
        k,
        v,
        beta=beta,
        g=None,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        options=make_options(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        ),
    )
