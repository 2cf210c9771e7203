"""What a layer has around the operator, in torch and for the CPU: convolutions and norms.

Activations lie token by token, ``[B, T, C]``. For torch that is a picture of height one in
channels-last order, and its depthwise convolution of such a picture neither copies nor transposes:
at 4096 tokens and 8192 channels it took a fifth of ``conv1d``'s time, which wants channels first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = (None, "silu", "swish")
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Zeros around the tokens: ``[B, T, C]`` and ``[C, W]`` to ``[B, T + W - 1, C]``."""
    channels, width = weight.shape
    picture = x.transpose(1, 2).unsqueeze(2)
    kernel = weight[:, None, None, :]
    y = F.conv2d(picture, kernel, bias, padding=(0, width - 1), groups=channels)
    return y.squeeze(2).transpose(1, 2)


class _Convolution(torch.autograd.Function):
    """The causal convolution with a gradient that stays in the tokens' order.

    Forward and backward at 2048 tokens and 8192 channels in bf16, on a busy machine: ``conv1d``
    2.7 s, ``conv2d`` with torch's own gradient 3.1 s, this 0.55 s; in fp32 2.5, 1.7 and 0.89 s.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _depthwise(x, weight, bias)[:, : x.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        tokens, width = x.shape[1], weight.shape[1]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        if needs_x:
            dx = _depthwise(dy, weight.flip(-1), None)[:, width - 1 :]
        if needs_weight:
            # Tap i sees the token width - 1 - i before. A product of rows, summed in fp32.
            taps = []
            for back in reversed(range(width)):
                late, early = dy[:, back:], x[:, : max(tokens - back, 0)]
                taps.append(torch.linalg.vecdot(late, early, dim=1).sum(0))
            dweight = torch.stack(taps, dim=-1).to(weight.dtype)
        if ctx.has_bias and needs_bias:
            dbias = dy.sum((0, 1))
        return dx, dweight, dbias


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Dense, from zeros; arithmetic in the weights' dtype, or autocast's; the result in x's."""
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    rows = x if x.stride(-1) == 1 else x.contiguous()
    y: Tensor = _Convolution.apply(
        rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )
    if activation is not None:
        y = F.silu(y, inplace=not y.requires_grad)
    return y.to(x.dtype)


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
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    if tokens == 0 or (initial_state is None and cu_seqlens is None and not output_final_state):
        if tokens == 0 and output_final_state:
            state = x.new_zeros(batch, channels, width) if initial_state is None else initial_state
            return x, state.to(x.dtype)
        return (x if tokens == 0 else _convolve(x, weight, bias, activation)), None
    if cu_seqlens is None:
        if initial_state is None:
            past = x.new_zeros(batch, width, channels)
        else:
            past = initial_state.transpose(1, 2).to(x.dtype)
        rows = torch.cat((past, x), dim=1)
        y = _convolve(rows, weight, bias, activation)[:, width:]
        last = rows[:, -width:].transpose(1, 2).contiguous() if output_final_state else None
        return y, last

    # Packed: before every sequence lie W rows, its state or zeros, that keep it from the others.
    offsets = cu_seqlens.to(device=x.device, dtype=torch.int64)
    lengths = offsets.diff()
    sequences, held = len(lengths), int(offsets[-1])
    number = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths)
    place = torch.arange(held, device=x.device) + (number + 1) * width
    rows = x.new_zeros(1, held + sequences * width, channels)
    rows = rows.index_copy(1, place, x[:, :held])
    bases = offsets[:-1] + torch.arange(sequences, device=x.device) * width
    window = torch.arange(width, device=x.device)
    if initial_state is not None:
        past = initial_state.transpose(1, 2).to(x.dtype).reshape(1, sequences * width, channels)
        rows = rows.index_copy(1, (bases[:, None] + window).flatten(), past)
    y = _convolve(rows, weight, bias, activation).index_select(1, place)
    if held < tokens:
        y = F.pad(y, (0, 0, 0, tokens - held))
    last = None
    if output_final_state:
        ends = ((bases + lengths)[:, None] + window).flatten()
        last = rows.index_select(1, ends).view(sequences, width, channels)
        last = last.transpose(1, 2).contiguous()
    return y, last


def conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """One token ``[N, C]`` per sequence; ``state [N, C, L]``, L >= W - 1 inputs, moves in place."""
    full = torch.cat((state, x.unsqueeze(-1).to(state.dtype)), dim=-1)
    state.copy_(full[..., 1:])
    y = (full[..., -weight.shape[1] :].float() * weight.float()).sum(-1)
    if bias is not None:
        y += bias.float()
    if activation is not None:
        y = F.silu(y, inplace=not y.requires_grad)
    return y.to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str
) -> Tensor:
    """``rms_norm(x) * weight * act(gate)``, act silu or sigmoid, in x's dtype."""
    act = _GATES[activation]
    inputs = (x, gate) if weight is None else (x, gate, weight)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if needs_grad or any(t.dtype != torch.float32 for t in inputs):
        wide = None if weight is None else weight.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], wide, eps) * act(gate).to(x.dtype)
    # One new tensor: for large ones memory that was never touched costs more than a pass over it.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = act(gate).mul_(x).mul_(scale)
    return y if weight is None else y.mul_(weight)
