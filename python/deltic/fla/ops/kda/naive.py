"""Kimi Delta Attention in plain torch."""

from torch import Tensor

from ... import _naive
from ..._surface import surface


@surface(ahead=True, g="B,T,HV,K", beta="B,T,HV|B,T,HV,V", initial_state="B,HV,K,V")
def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token. Shapes as in ``chunk_kda``; o in v's dtype."""
    o, state = _naive.recurrent(q, k, v, beta, g, scale, initial_state)
    return o.to(v.dtype), state if output_final_state else None


@surface(ahead=True, g="B,T,HV,K", beta="B,T,HV|B,T,HV,V", initial_state="B,HV,K,V")
def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk; any number of tokens. o in v's dtype."""
    o, state = _naive.chunked(q, k, v, beta, g, scale, initial_state, chunk_size)
    return o.to(v.dtype), state if output_final_state else None
