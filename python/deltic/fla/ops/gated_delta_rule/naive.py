"""Gated DeltaNet in plain torch."""

from torch import Tensor

from ... import _naive
from ..._surface import surface


@surface(ahead=True, beta="B,T,HV|B,T,HV,V", g="B,T,HV", initial_state="B,HV,K,V")
def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token; beta before g. Shapes as in ``chunk_gated_delta_rule``, results in fp32."""
    o, state = _naive.recurrent(q, k, v, beta, g, scale, initial_state)
    return o, state if output_final_state else None


@surface(ahead=True, g="B,T,HV", beta="B,T,HV|B,T,HV,V", initial_state="B,HV,K,V")
def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk; g before beta. Any number of tokens, results in fp32."""
    o, state = _naive.chunked(q, k, v, beta, g, scale, initial_state, chunk_size)
    return o, state if output_final_state else None
