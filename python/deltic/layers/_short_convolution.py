"""A causal depthwise convolution over a few tokens, with state, for dense and packed batches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._conv import MOST_TAPS as _MOST_TAPS
from .._conv import Activation, causal_conv1d, causal_conv1d_update, has_kernels
from .._library import got
from ._checks import expect_size, own_words
from ._packing import Packing


def _is_native(x: Tensor, width: int) -> bool:
    """Whether deltic's operator takes it; else a few plain operations do."""
    return has_kernels(x) and width <= _MOST_TAPS


def is_writable(state: Tensor) -> bool:
    """Whether a state may be updated in place: no graph has it, and torch lets us."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or state.requires_grad:
        return False
    return torch.is_inference_mode_enabled() or not state.is_inference()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of shifted products in fp32, ``window [B, T + W - 1, D]``."""
    width = weight.shape[1]
    rows = window.shape[1] - width + 1
    columns = _wide(weight).t()
    y = window[:, :rows] * columns[0]
    for i in range(1, width):
        y = torch.addcmul(y, _wide(window[:, i : i + rows]), columns[i])
    return y if bias is None else y + bias


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, packing: Packing
) -> Tensor:
    """The convolution by plain operations: on other devices, or with more taps."""
    history = weight.shape[1] - 1
    before_first = None if state is None else state.transpose(1, 2)
    if packing.cu_seqlens is None:
        if before_first is None:
            return _taps(F.pad(x, (0, 0, history, 0)), weight, bias)
        return _taps(torch.cat([before_first, x], dim=1), weight, bias)
    sequence, position = packing.positions(x.shape[1])
    lag = torch.arange(history, -1, -1, device=x.device)
    here = torch.arange(x.shape[1], device=x.device)[:, None] - lag
    before = position[:, None] - lag  # negative: so many inputs before the first token
    if before_first is None:
        before_first = x.new_zeros(packing.sequences, history, x.shape[2])
    # One table: the rows, behind them the inputs before each sequence, oldest first.
    table = torch.cat([x[0], before_first.flatten(0, 1)])
    old = x.shape[1] + (sequence[:, None] + 1) * history + before
    window = table[torch.where(before >= 0, here, old)]
    return _taps(window, weight, bias).transpose(0, 1)


def _next_state(x: Tensor, state: Tensor | None, packing: Packing, history: int) -> Tensor:
    """The last ``history`` inputs of every sequence, ``[N, D, history]``, oldest first."""
    tokens, channels = x.shape[1:]
    if packing.cu_seqlens is None and tokens >= history:
        return x[:, tokens - history :].transpose(1, 2).clone()
    if state is None:
        state = x.new_zeros(packing.sequences, channels, history)
    if packing.cu_seqlens is None:
        return torch.cat([state[..., tokens:], x.transpose(1, 2)], dim=2)
    if tokens == 0 or history == 0:
        return state
    tail = packing.tail(history, tokens)
    old = state.transpose(1, 2).gather(1, tail.old[..., None].expand(-1, -1, channels))
    return torch.where(tail.is_token[..., None], x[0][tail.rows], old).transpose(1, 2)


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution with an optional activation.

    The parameters are those of a depthwise ``nn.Conv1d``: ``weight [D, 1, W]`` and ``bias [D]``.
    Its state is the last ``W - 1`` inputs of every sequence, ``[N, D, W - 1]``, oldest first.
    Without gradients a state that is given and asked for again is updated in place.

    >>> import torch
    >>> from deltic.layers import ShortConvolution
    >>> layer, x = ShortConvolution(16, 4), torch.randn(2, 10, 16)
    >>> y, state = layer(x[:, :9], output_final_state=True)
    >>> last, _ = layer(x[:, 9:], state)
    >>> torch.allclose(last, layer(x)[0][:, 9:], atol=1e-6), state.shape
    (True, torch.Size([2, 16, 3]))
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
        expect_size("ShortConvolution", "hidden_size", hidden_size)
        expect_size("ShortConvolution", "kernel_size", kernel_size)
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

    @own_words(state="initial_state state_pool")
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: Tensor | None = None,
        output_final_state: bool = False,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``x [B, T, D]`` convolved, and the next state if asked for."""
        if not isinstance(x, Tensor):
            raise TypeError(f"ShortConvolution: x: expected a tensor, got {got(x)}")
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"ShortConvolution: x: expected shape [batch, tokens, {self.hidden_size}], "
                f"got {list(x.shape)}"
            )
        if packing is None:
            packing = Packing(x.shape[0], x.shape[1])
        if state is not None and state.dtype != x.dtype:
            state = state.to(x.dtype)
        weight, width = self.weight[:, 0], self.kernel_size[0]
        activation: Activation = None if self.activation is None else "silu"
        if not _is_native(x, width):
            y = _plain(x, weight, self.bias, state, packing)
            y = (y if activation is None else F.silu(y)).to(x.dtype)
            return y, _next_state(x, state, packing, width - 1) if output_final_state else None
        if width == 1:  # nothing to remember: an operator's state has one input at least
            state = None
        elif packing.cu_seqlens is None and output_final_state and state is not None:
            if is_writable(state):
                y = causal_conv1d_update(x, state, weight, self.bias, activation=activation)
                return y, state
        y, last = causal_conv1d(
            x,
            weight,
            self.bias,
            activation=activation,
            initial_state=state,
            output_final_state=output_final_state,
            cu_seqlens=packing.cu_seqlens,
            cu_seqlens_cpu=packing.cu_seqlens_cpu,
        )
        return y, last[..., :0] if last is not None and width == 1 else last
