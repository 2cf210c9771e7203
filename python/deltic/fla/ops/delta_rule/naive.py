"""DeltaNet in plain torch. Tensors are ``[B, H, T, ...]`` here, heads first; scale is K^-1/2."""

import torch
from torch import Tensor

from ... import _naive
from ..._call import wide
from ..._surface import surface


def _heads_second(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), beta.transpose(1, 2)


@surface(
    ahead=True,
    q="B,HV,T,K",
    k="B,HV,T,K",
    v="B,HV,T,V",
    beta="B,HV,T|B,HV,T,V",
    initial_state="B,HV,K,V",
)
def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Token by token; ``beta [B, H, T]`` or ``[B, H, T, V]``. o in q's dtype, the state in fp32."""
    o, state = _naive.recurrent(*_heads_second(q, k, v, beta), initial_state=initial_state)
    return o.transpose(1, 2).to(q.dtype), state if output_final_state else None


@surface(ahead=True, q="B,HV,T,K", k="B,HV,T,K", v="B,HV,T,V", beta="B,HV,T|B,HV,T,V")
def delta_rule_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; any number of tokens. o and the last state in fp32."""
    o, state = _naive.chunked(*_heads_second(q, k, v, beta), chunk_size=chunk_size)
    return o.transpose(1, 2), state


@surface(ahead=True, q="B,HV,T,K", k="B,HV,T,K", v="B,HV,T,V", beta="B,HV,T")
def delta_rule_parallel(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, BM: int = 128, BN: int = 32
) -> tuple[Tensor, Tensor]:
    """As one matrix, ``o = A (beta v)``. The block sizes BM and BN change nothing here.

    Returns:
        o in v's dtype and ``A [B, H, T, T]`` in fp32.
    """
    dtype = wide(q)
    query, key, beta = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), beta.to(dtype).unsqueeze(-1)
    eye = torch.eye(q.shape[-2], dtype=dtype, device=q.device)
    lower = eye + (beta * (key @ key.mT)).tril(-1)
    # A (I + L) = tril(q k^T).
    A = torch.linalg.solve_triangular(
        lower, (query @ key.mT).tril(), upper=False, left=False, unitriangular=True
    )
    return (A @ (beta * v.to(dtype))).to(v.dtype), A
