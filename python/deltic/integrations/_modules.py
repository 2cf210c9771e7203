"""What a model's layers have around the operator: convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._conv import MOST_TAPS, causal_conv1d, causal_conv1d_update

ACTIVATIONS = (None, "silu", "swish")


def takes_weight(weight: Tensor) -> bool:
    """Whether deltic's convolution has as many taps."""
    return weight.shape[-1] <= MOST_TAPS


def offsets_of(seq_idx: Tensor) -> Tensor:
    """``cu_seqlens`` of sequences numbered in ``[B, T]``, the batch's rows one after another."""
    batch, tokens = seq_idx.shape
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return F.pad(first, (0, 1), value=batch * tokens)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A depthwise causal convolution over whole sequences, differentiable.

    Args:
        x: ``[B, T, C]``; with ``cu_seqlens [N + 1]`` a batch of one.
        weight: ``[C, W]``, the last tap is the token's own.
        activation: silu, or none.
        initial_state: ``[N, C, W]``, the W inputs before.
        output_final_state: returns the last W inputs.

    Returns:
        ``y [B, T, C]`` in x's dtype, and the final state or None.
    """
    rows = x if x.stride(-1) == 1 else x.contiguous()
    if initial_state is None and output_final_state:
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = rows.new_zeros(sequences, x.shape[2], weight.shape[1])
    y, last = causal_conv1d(
        rows,
        weight,
        bias,
        activation=None if activation is None else "silu",
        initial_state=None if initial_state is None else initial_state.to(rows.dtype),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return y.to(x.dtype), last


def conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """One token ``[N, C]`` per sequence; ``state [N, C, L]``, L >= W - 1 inputs, moves in place."""
    with torch.no_grad():
        return causal_conv1d_update(
            x.to(state.dtype),
            state,
            weight,
            bias,
            activation=None if activation is None else "silu",
        ).to(x.dtype)
