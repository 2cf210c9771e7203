"""What the three operators of this package share: checks, dtypes and the calls of the native API.

DeltaNet, Gated DeltaNet and KDA differ in the gate they pass on, and in nothing else.
"""

import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from .. import _native
from .._library import got, type_name

MAX_KEY_WIDTH = 256


def refuse_unknown(function: str, kwargs: dict[str, Any]) -> None:
    """A TypeError for keywords that nobody took."""
    for name in kwargs:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def check_tensors(function: str, q: Any, k: Any, v: Any) -> None:
    """A TypeError where one of them is no tensor, or one of whole numbers."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name}: expected a tensor, got {got(x)}")
        if not x.is_floating_point():
            expected = f"{function}: {name}: expected fp32, bf16 or fp16"
            raise TypeError(f"{expected}, got {type_name(x.dtype)}")


def refuse_head_first(kwargs: dict[str, Any]) -> None:
    """The layout with heads first is gone: the keyword raises its deprecation."""
    if "head_first" in kwargs:
        raise DeprecationWarning("`head_first` is no longer an option: pass [B, T, H, ...] tensors")


def refuse_context(cp_context: Any) -> None:
    """Context parallelism is not there yet."""
    if cp_context is not None:
        raise NotImplementedError("`cp_context`: context parallelism is not supported")


def state_layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """`state_v_first`, with its older name taken from kwargs."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "`state_v_first` and its deprecated name `transpose_state_layout` were both passed"
        )
    warnings.warn(
        "`transpose_state_layout` is deprecated: it is now called `state_v_first`",
        DeprecationWarning,
        stacklevel=4,
    )
    return bool(kwargs.pop("transpose_state_layout"))


def take_chunk_size(kwargs: dict[str, Any], allowed: tuple[int, ...], op: str) -> int:
    """`chunk_size` from kwargs, one of the allowed ones."""
    chunk_size = kwargs.pop("chunk_size", 64)
    if chunk_size not in allowed:
        words = ", ".join(map(str, allowed[:-1])) + f" or {allowed[-1]}"
        raise ValueError(f"`chunk_size` for {op}: expected {words}, got {chunk_size}")
    return int(chunk_size)


def check_sequences(q: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> None:
    """Packed sequences have a batch of one, and a state each."""
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens must come with a batch size of 1, of packed sequences, got {q.shape[0]}"
        )
    sequences = len(cu_seqlens) - 1
    if initial_state is not None and initial_state.shape[0] != sequences:
        raise ValueError(
            f"initial_state must have a state for each of the {sequences} sequences, "
            f"got {initial_state.shape[0]}"
        )


def check_negative_eigenvalues(allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool) -> None:
    """2 * sigmoid is a form of the sigmoid."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("`allow_neg_eigval=True` needs `use_beta_sigmoid_in_kernel=True`")


def check_key_width(k: Tensor) -> None:
    """The widest key the operators take."""
    assert k.shape[-1] <= MAX_KEY_WIDTH, (
        f"the key width must be at most {MAX_KEY_WIDTH}, got {k.shape[-1]}"
    )


class Options(NamedTuple):
    """The options of one call, as the native functions name them."""

    scale: float | None = None
    output_final_state: bool = False
    qk_l2norm: bool = False
    gate: str = "log_decay"
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    beta_form: str = "value"
    state_layout: str = "kv"


def make_options(
    *,
    scale: float | None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> Options:
    """The native options for the flags of this surface.

    The gate's parameters count with `use_gate_in_kernel` only, and a lower bound selects the
    bounded gate.
    """
    form = "2sigmoid" if allow_neg_eigval else "sigmoid"
    options = Options(
        scale=scale,
        output_final_state=bool(output_final_state),
        qk_l2norm=bool(use_qk_l2norm_in_kernel),
        beta_form=form if use_beta_sigmoid_in_kernel else "value",
        state_layout="vk" if state_v_first else "kv",
    )
    if not use_gate_in_kernel:
        return options
    return options._replace(
        gate="softplus" if lower_bound is None else "bounded",
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )


@overload
def rows(x: Tensor) -> Tensor: ...
@overload
def rows(x: None) -> None: ...
def rows(x: Tensor | None) -> Tensor | None:
    """A tensor whose last dimension lies without gaps; others are copied."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the one dtype that holds all of theirs."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for the oracle."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def run(
    name: str,
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    options: Options,
    dtype: torch.dtype,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """`deltic.delta_rule` or `deltic.recurrent` with this surface's dtypes and names.

    q, k and v may differ in dtype, a state may have any, final states are fp32, and o has the dtype
    asked for. Autocast is left outside: the dtypes of the tensors are the ones that count.
    """
    q, k, v = one_dtype(q, k, v)
    if initial_state is not None:
        if not initial_state.is_floating_point():
            found = type_name(initial_state.dtype)
            raise TypeError(f"{name}: initial_state: expected fp32, bf16 or fp16, got {found}")
        initial_state = rows(initial_state.to(wide(q)))
    arguments = dict(
        beta=rows(beta),
        g=rows(g),
        initial_state=initial_state,
        cu_seqlens=rows(cu_seqlens),
        cu_seqlens_cpu=None if cu_seqlens is None else rows(cu_seqlens_cpu),
        **options._asdict(),
        **others,
    )
    if beta is None:
        arguments["beta_form"] = "value"  # absent means 1, and 1 is no logit
    # There is no autocast for meta tensors, and torch says so with an error.
    calm: Any = nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)
    with calm:
        if torch.compiler.is_compiling():
            o, final_state = function(rows(q), rows(k), rows(v), **arguments)
        else:
            try:
                o, final_state = function(rows(q), rows(k), rows(v), **arguments)
            except (ValueError, TypeError, RuntimeError, MemoryError) as error:
                raise _said_by(name, function.__name__, error) from None
    return o.to(dtype), final_state


def _said_by(name: str, native: str, error: Exception) -> Exception:
    """An error of a native function as that of the function that was called."""
    text = str(error)
    if not text.startswith(f"{native}: "):
        return error
    return type(error)(name + text.removeprefix(native))


def chunk(
    name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """The chunked form for the function of that name; o in q's dtype."""
    return run(name, _native.delta_rule, q, k, v, dtype=q.dtype, **arguments)


def recurrent(
    name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """The recurrent form for the function of that name; o in v's dtype."""
    return run(name, _native.recurrent, q, k, v, dtype=v.dtype, **arguments)
