"""A causal depthwise convolution over a few tokens, with state, for dense and packed batches."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ._packing import Packing

# Elements up to which a few plain operations beat a call of the convolution library.
_FEW = 1 << 17
# Rows times channels that the weight's gradient takes at a time: 1 MiB of fp32 stays in the cache.
_BLOCK = 1 << 18
_LIBRARY_DTYPES = (torch.float32, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, pad: int) -> Tensor:
    """The library's convolution along the rows of ``x [B, T, D]`` with ``pad`` zeros around.

    As an image of T x 1 with its channels last the rows stay where they are: at 4096 x 8192 in
    fp32 that takes a seventh of the time that a one-dimensional convolution does.
    """
    channels, width = weight.shape
    with torch.autocast(x.device.type, enabled=False):
        y = F.conv2d(
            x.unsqueeze(2).permute(0, 3, 1, 2),
            weight.reshape(channels, 1, width, 1),
            bias,
            padding=(pad, 0),
            groups=channels,
        )
    return y.permute(0, 2, 3, 1).squeeze(2)


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same without padding, as a sum of shifted products in fp32."""
    width = weight.shape[1]
    rows = window.shape[1] - width + 1
    columns = _wide(weight).t().contiguous()
    if rows == 1:
        y = (window * columns).sum(dim=1, keepdim=True)
    else:
        y = window[:, :rows] * columns[0]
        for i in range(1, width):
            y = torch.addcmul(y, _wide(window[:, i : i + rows]), columns[i])
    return y if bias is None else y + bias


def _weight_gradient(dy: Tensor, x: Tensor, width: int) -> Tensor:
    """The gradient ``[width, D]`` of the taps: ``y_t = sum_i w_i x_{t + i}``, in blocks of rows."""
    batch, tokens, channels = dy.shape
    found = dy.new_zeros((width, channels), dtype=_wide(dy[:0]).dtype)
    block = max(1, _BLOCK // max(channels, 1))
    group = max(1, block // max(tokens, 1))  # short rows: of several sequences at a time
    for first in range(0, batch, group):
        for start in range(0, tokens, block):
            rows = _wide(dy[first : first + group, start : start + block])
            others = _wide(x[first : first + group, start : start + block + width - 1])
            for i in range(width):
                found[i] += (rows * others[:, i : i + rows.shape[1]]).sum(dim=(0, 1))
    return found


class _Heads(NamedTuple):
    """The first rows of every sequence behind the inputs before them, and where they stand."""

    window: Tensor  # [N, history + rows, D]
    rows: Tensor | None  # in a packed batch: the rows that exist
    exists: Tensor | None  # [N, history]: which those are
    history: int

    @classmethod
    def of(cls, x: Tensor, state: Tensor | None, packing: Packing, history: int) -> "_Heads | None":
        """None where zeros come before every row of x that is the first of a sequence."""
        if history == 0 or (state is None and packing.cu_seqlens is None):
            return None
        before = x.new_zeros(packing.sequences, history, x.shape[2]) if state is None else state
        if packing.cu_seqlens is None:
            return cls(torch.cat([before, x[:, :history]], dim=1), None, None, history)
        rows, exists = packing.heads(history)
        first = x[0].index_select(0, rows.clamp(max=x.shape[1] - 1).flatten())
        window = torch.cat([before, first.view(*rows.shape, -1)], dim=1)
        return cls(window, rows[exists], exists, history)

    def put(self, heads: Tensor, y: Tensor) -> None:
        """Writes what was computed for the heads into y."""
        if self.rows is None:
            y[:, : heads.shape[1]] = heads
        else:
            y[0].index_copy_(0, self.rows, heads[self.exists])

    def take(self, y: Tensor) -> Tensor:
        """The rows of y for the heads, 0 where there is none; y has 0 in their place then."""
        if self.rows is None or self.exists is None:
            found = y[:, : self.history].clone()
            y[:, : self.history] = 0
            return found
        found = y.new_zeros(*self.exists.shape, y.shape[2])
        found[self.exists] = y[0, self.rows]
        y[0].index_fill_(0, self.rows, 0)
        return found

    def add(self, heads: Tensor, y: Tensor) -> None:
        """Adds rows for the heads to y."""
        if self.rows is None:
            y[:, : heads.shape[1]] += heads
        else:
            y[0].index_add_(0, self.rows, heads[self.exists])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, heads: _Heads | None) -> Tensor:
    """Every row as if the rows before it in memory came before it in its sequence; then the heads
    again, with what did."""
    cast_bias = None if bias is None else bias.to(x.dtype)
    y = _convolve(x, weight.to(x.dtype), cast_bias, weight.shape[1] - 1)[:, : x.shape[1]]
    if heads is not None:
        heads.put(_taps(heads.window, weight, bias).to(y.dtype), y)
    return y


class _CausalConvolution(torch.autograd.Function):
    """The convolution and its activation for long rows; keeps its inputs only.

    Torch's own gradient of a depthwise convolution takes 4 s (fp32) and a minute (bf16) for 4096 x
    8192; with respect to the input it is the convolution by the mirrored weight, and with respect
    to the weight a few sums of products: 0.5 s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        packing: Packing,
        is_silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, state)
        ctx.packing, ctx.is_silu = packing, is_silu
        y = _linear(x, weight, bias, _Heads.of(x, state, packing, weight.shape[1] - 1))
        return F.silu(y, inplace=True) if is_silu else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, state = ctx.saved_tensors
        width = weight.shape[1]
        history = width - 1
        heads = _Heads.of(x, state, ctx.packing, history)
        if ctx.is_silu:
            dy = torch.ops.aten.silu_backward(dy, _linear(x, weight, bias, heads))
        elif heads is not None:
            dy = dy.clone()  # the heads' rows are taken out of it
        d_bias = None if bias is None else _wide(dy).sum(dim=(0, 1)).to(bias.dtype)
        d_heads = None if heads is None else heads.take(dy)
        d_weight = _weight_gradient(dy, F.pad(x, (0, 0, history, 0)), width)
        dx = _convolve(dy, weight.to(dy.dtype).flip(1), None, history)[:, history:]
        d_state = None
        if heads is not None and d_heads is not None:
            d_weight += _weight_gradient(d_heads, heads.window, width)
            d_heads = F.pad(d_heads, (0, 0, history, history))
            d_window = _taps(d_heads, weight.flip(1), None)
            heads.add(d_window[:, history:].to(dx.dtype), dx)
            d_state = None if state is None else d_window[:, :history].to(state.dtype)
        return dx, d_weight.t().to(weight.dtype), d_bias, d_state, None, None


def _few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, packing: Packing
) -> Tensor:
    """The linear part by plain operations: for short inputs, compilers and fp64."""
    history = weight.shape[1] - 1
    if packing.cu_seqlens is None:
        window = F.pad(x, (0, 0, history, 0)) if state is None else torch.cat([state, x], dim=1)
        return _taps(window, weight, bias)
    sequence, position = packing.positions(x.shape[1])
    lag = torch.arange(history, -1, -1, device=x.device)
    here = torch.arange(x.shape[1], device=x.device)[:, None] - lag
    before = position[:, None] - lag  # negative: so many inputs before the first token
    if state is None:
        state = x.new_zeros(packing.sequences, history, x.shape[2])
    # One table: the rows, behind them the inputs before each sequence, oldest first.
    table = torch.cat([x[0], state.flatten(0, 1)])
    old = x.shape[1] + (sequence[:, None] + 1) * history + before
    window = table[torch.where(before >= 0, here, old)]
    return _taps(window, weight, bias).transpose(0, 1)


def _next_state(x: Tensor, state: Tensor | None, packing: Packing, history: int) -> Tensor:
    """The last ``history`` inputs of every sequence, ``[N, history, D]``, oldest first."""
    tokens, channels = x.shape[1:]
    if packing.cu_seqlens is None and tokens >= history:
        return x[:, tokens - history :].clone()
    if state is None:
        state = x.new_zeros(packing.sequences, history, channels)
    if packing.cu_seqlens is None:
        return torch.cat([state[:, tokens:], x], dim=1)
    if tokens == 0 or history == 0:
        return state
    tail = packing.tail(history, tokens)
    old = state.gather(1, tail.old[..., None].expand(-1, -1, channels))
    return torch.where(tail.is_token[..., None], x[0][tail.rows], old)


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution with an optional activation.

    The parameters are those of a depthwise ``nn.Conv1d``: ``weight [D, 1, W]`` and ``bias [D]``.
    Its state is the last ``W - 1`` inputs of every sequence, ``[N, W - 1, D]``, oldest first.

    >>> import torch
    >>> from deltic.layers import ShortConvolution
    >>> layer, x = ShortConvolution(16, 4), torch.randn(2, 10, 16)
    >>> y, state = layer(x[:, :9], output_final_state=True)
    >>> last, _ = layer(x[:, 9:], state)
    >>> torch.allclose(last, layer(x)[0][:, 9:], atol=1e-6), state.shape
    (True, torch.Size([2, 3, 16]))
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
    ) -> None:
        if activation not in (None, "silu", "swish"):
            raise ValueError(
                "ShortConvolution: activation: expected None, 'silu' or 'swish', "
                f"got {activation!r}"
            )
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            padding=kernel_size - 1,
            bias=bias,
        )
        self.hidden_size = hidden_size
        self.activation = activation

    def extra_repr(self) -> str:
        width, has_bias = self.kernel_size[0], self.bias is not None
        return f"{self.hidden_size}, {width}, bias={has_bias}, activation={self.activation!r}"

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: Tensor | None = None,
        output_final_state: bool = False,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``x [B, T, D]`` convolved, and the next state if asked for."""
        if packing is None:
            packing = Packing(x.shape[0], x.shape[1])
        if state is not None and state.dtype != x.dtype:
            state = state.to(x.dtype)
        weight, is_silu = self.weight[:, 0], self.activation is not None
        if x.numel() <= _FEW or x.dtype not in _LIBRARY_DTYPES or torch.compiler.is_compiling():
            y = _few_rows(x, weight, self.bias, state, packing)
            y = (F.silu(y) if is_silu else y).to(x.dtype)
        else:
            y = _CausalConvolution.apply(x, weight, self.bias, state, packing, is_silu)
        if not output_final_state:
            return y, None
        return y, _next_state(x, state, packing, self.kernel_size[0] - 1)
