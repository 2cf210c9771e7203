"""flash-linear-attention's delta-rule models on deltic's operators.

Operators that its registry of backends knows are registered there; the others are replaced in every
module of it that holds them. On the CPU its convolutions, norms and losses are Triton kernels that
cannot run: for CPU tensors, and for these only, they are replaced by ours and torch's.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from .._explain import explain
from ..fla.ops import delta_rule, gated_delta_rule, kda
from ..layers._norms import GATE_ACTIVATIONS, rms_norm
from ._modules import ACTIVATIONS, causal_conv, conv_step
from ._patch import Report, Switch, Target, named, say_once

_switch = Switch()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Its own modules, and those that transformers makes of code that comes with a checkpoint.
_PACKAGES = ("fla", "transformers_modules")

# Operator: its module there, and what takes its place. The first two have a registry.
_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "chunk_kda": ("kda", kda.chunk_kda),
    "chunk_gated_delta_rule": ("gated_delta_rule", gated_delta_rule.chunk_gated_delta_rule),
    "chunk_delta_rule": ("delta_rule", delta_rule.chunk_delta_rule),
    "fused_recurrent_kda": ("kda", kda.fused_recurrent_kda),
    "fused_recurrent_gated_delta_rule": (
        "gated_delta_rule",
        gated_delta_rule.fused_recurrent_gated_delta_rule,
    ),
    "fused_recurrent_delta_rule": ("delta_rule", delta_rule.fused_recurrent_delta_rule),
}
_BY_TOKEN = tuple(ours for name, (_, ours) in _OPERATORS.items() if name.startswith("fused"))
_REGISTERED = ("chunk_kda", "chunk_gated_delta_rule")
# Keywords that the functions take without naming them in their signatures.
_UNNAMED = {"A_log", "dt_bias", "use_gate_in_kernel", "chunk_size", "transpose_state_layout"}


@cache
def _takes(device_type: str, trains: bool) -> bool:
    """Whether this build has an operator for a kind of device, and its gradient: by a call."""
    x = torch.zeros(1, 1, 1, 16, device=device_type)
    try:
        with torch.set_grad_enabled(trains):
            _native.delta_rule(x.requires_grad_(trains), x, x)
    except NotImplementedError:
        return False
    return True


@torch.compiler.assume_constant_result
def _runs_on(device_type: str, trains: bool) -> bool:
    """The same, which a compiler asks once and leaves out of its graph."""
    return _takes(device_type, trains)


# Takes every call, in fp32 arithmetic: 17 to 39 times the time of tensor cores.
_EXACT = "cuda.general"
# What decides who computes gradients: whether it goes by tokens; q, k and v's dtype; H, HV, K and
# V; the ranks of g, beta and gv, 0 for one that is absent; the chunk length; whether rows of q, k
# and v start at multiples of 16 bytes.
_Form = tuple[bool, torch.dtype, int, int, int, int, int, int, int, int, bool]


@cache
def _left_in_training(form: _Form) -> str | None:
    """Why gradients of such CUDA tensors are left to flash-linear-attention."""
    by_token, dtype, H, HV, K, V, g, beta, gv, chunk_size, is_aligned = form

    def rows(heads: int, width: int) -> Tensor:
        gap = 0 if is_aligned else 1
        return torch.empty(1, 1, heads, width + gap, dtype=dtype, device="meta")[..., :width]

    def beside(width: int, rank: int) -> Tensor | None:
        shape = (1, 1, HV, width)[:rank]
        return torch.empty(shape, dtype=dtype, device="meta") if rank else None

    given: dict[str, Any] = {"g": beside(K, g), "beta": beside(V, beta)}
    given |= {"gv": beside(V, gv)} if by_token else {"chunk_size": chunk_size}
    function = _native.recurrent if by_token else _native.delta_rule
    try:
        with torch.enable_grad():
            q = rows(H, K).requires_grad_()
            call = explain(q, rows(H, K), rows(HV, V), **given, function=function, device="cuda")
    except (ValueError, TypeError, NotImplementedError):
        return None  # the call itself says what is wrong with it
    found = call.backward
    if found is None or found.implementation is None:
        return "no gradients of cuda tensors in this build"
    if found.implementation != _EXACT:
        return None
    others = (f"{x.name}: {x.sentence}" for x in found.choices if x.name.startswith("cuda."))
    why = next((x for x in others if not x.startswith(_EXACT)), "none in this build")
    return f"gradients without tensor cores ({why})"


@torch.compiler.assume_constant_result
def _in_training(form: _Form) -> str | None:
    """The same, which a compiler asks once and leaves out of its graph."""
    return _left_in_training(form)


def _form_of(by_token: bool, given: dict[str, Any]) -> _Form | None:
    """A call's form; None for what its operator refuses."""
    rows = [x for name in "qkv" if isinstance(x := given.get(name), Tensor) and x.dim() == 4]
    chunk_size = given.get("chunk_size", 64)
    if len(rows) != 3 or not isinstance(chunk_size, int):
        return None
    q, k, v = rows
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    ranks = [
        x.dim() if isinstance(x := given.get(name), Tensor) else 0
        for name in ("g", "gk", "beta", "gv")
    ]
    is_aligned = True
    for x in rows:
        # One of another dtype, or with gaps between its numbers, is copied before.
        if x.dtype == dtype and x.stride(3) == 1:
            row, head = x.stride(1) * x.element_size(), x.stride(2) * x.element_size()
            if row % 16 or head % 16:  # a branch: its condition is no symbol of a compiler
                is_aligned = False
    # `index` makes a number of what a compiler with dynamic shapes has; `int` does not.
    H, HV, K, V = (index(x) for x in (q.shape[2], v.shape[2], q.shape[3], v.shape[3]))
    g, gk, beta, gv = ranks
    return (by_token, dtype, H, HV, K, V, max(g, gk), beta, gv, chunk_size, is_aligned)


# Called for every call: signatures are read once.
_PARAMETERS = {ours: tuple(inspect.signature(ours).parameters) for _, ours in _OPERATORS.values()}


def _refusal(ours: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call is left to flash-linear-attention."""
    given = {**dict(zip(_PARAMETERS[ours], args, strict=False)), **kwargs}
    q, v = given.get("q"), given.get("v")
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        return "no tensors q and v"
    trains = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in given.values()
    )
    if q.dtype not in _DTYPES or v.dtype not in _DTYPES:
        return f"{q.dtype} queries and {v.dtype} values"
    if q.device.type == "cuda" and trains:
        form = _form_of(ours in _BY_TOKEN, given)
        reason: str | None = None if form is None else _in_training(form)
        if reason is not None:
            return reason
    elif q.device.type != "cpu" and not _runs_on(q.device.type, trains):
        return f"no operator for {q.device.type} tensors in this build"
    if given.get("cp_context") is not None:
        return "context parallelism"
    known = _PARAMETERS[ours]
    unknown = [name for name in given if name not in known and name not in _UNNAMED]
    return f"the keyword {unknown[0]!r}" if unknown else None


@cache
def _backend() -> Any:
    """The class that is registered, once in a process; its attribute `active` switches it."""
    base: Any = importlib.import_module("fla.backends").BaseBackend

    class DelticBackend(base):  # type: ignore[misc]
        """deltic's operators for flash-linear-attention's registry."""

        backend_type = "deltic"
        priority = -1  # before all others: who calls enable() wants this one
        active = False

        def is_enabled(self) -> bool:
            return self.active

    for name in _REGISTERED:
        ours = _OPERATORS[name][1]

        def run(self: Any, *args: Any, _ours: Callable[..., Any] = ours, **kwargs: Any) -> Any:
            return _ours(*args, **kwargs)

        def verify(
            self: Any, *args: Any, _ours: Callable[..., Any] = ours, **kwargs: Any
        ) -> tuple[bool, str | None]:
            reason = _refusal(_ours, args, kwargs)
            return reason is None, reason

        setattr(DelticBackend, name, run)
        setattr(DelticBackend, f"{name}_verifier", verify)
    return DelticBackend


@cache
def _register() -> str | None:
    """Registers the backend; a sentence where there is no registry that would be asked."""
    try:
        backends = importlib.import_module("fla.backends")
    except ImportError:
        return "no registry of backends in this version"
    if getattr(backends, "_DISPATCH_DISABLED", False):
        return "FLA_DISABLE_BACKEND_DISPATCH turns the registry off"
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    backends.register(chunk_kda)(_backend())
    backends.register("gated_delta_rule")(_backend())
    return None


def _make_operator(original: Any, name: str) -> Any:
    ours = _OPERATORS[name][1]

    def operator(*args: Any, **kwargs: Any) -> Any:
        reason = _refusal(ours, args, kwargs)
        if reason is None:
            return ours(*args, **kwargs)
        if not torch.compiler.is_compiling():
            say_once(name, reason)
        return original(*args, **kwargs)

    return named(operator, original, name)


def _with_residual(
    x: Tensor, residual: Tensor | None, residual_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """What is normalised, and what goes on beside it."""
    if residual is not None:
        total = x.to(residual.dtype) + residual
    else:
        total = x.float() if residual_in_fp32 else x
    return total, total


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    total, beside = _with_residual(x, residual, residual_in_fp32)
    y = F.rms_norm(total, total.shape[-1:], None if weight is None else weight.to(total), eps)
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    return (y, beside) if prenorm else y


def _rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    if bias is not None:
        raise NotImplementedError("rms_norm_gated: bias: expected None on the CPU, got a tensor")
    total, beside = _with_residual(x, residual, residual_in_fp32)
    if activation not in GATE_ACTIVATIONS:
        raise ValueError(
            f"rms_norm_gated: activation: expected swish, silu or sigmoid, got {activation!r}"
        )
    y = rms_norm(total, weight, g, eps, activation == "sigmoid").to(x.dtype)
    return (y, beside) if prenorm else y


def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    if cp_context is not None:
        raise NotImplementedError("causal_conv1d: cp_context: expected None on the CPU")
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation: expected silu or None, got {activation!r}")
    y, state = causal_conv(
        x.reshape(*x.shape[:2], weight.shape[0]),
        weight,
        bias,
        activation,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
    )
    y = y.view(x.shape)
    return (y if residual is None else y + residual), state


def _causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    if weight is None:
        raise TypeError("causal_conv1d_update: weight: expected a tensor, got none")
    y = conv_step(x.reshape(-1, weight.shape[0]), cache, weight, bias, activation).view(x.shape)
    return (y if residual is None else y + residual), cache


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def _swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(_swiglu(x, y).to(weight.dtype), weight, bias)


def _logits_loss(logits: Tensor, target: Tensor, loss: Any) -> Tensor:
    logits = logits.float() * loss.logit_scale
    if loss.logit_softcapping is not None:
        logits = loss.logit_softcapping * torch.tanh(logits / loss.logit_softcapping)
    return F.cross_entropy(
        logits,
        target,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )


def _linear_loss(
    self: Any, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if self.use_l2warp or self.process_group is not None:
        raise NotImplementedError(
            "FusedLinearCrossEntropyLoss: expected no use_l2warp and no process_group on the CPU"
        )
    logits = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return _logits_loss(logits, target.reshape(-1), self)


def _loss(self: Any, input: Tensor, target: Tensor) -> Tensor:
    if self.lse_square_scale or self.return_z_loss or self.process_group is not None:
        raise NotImplementedError(
            "FusedCrossEntropyLoss: expected no z-loss and no process_group on the CPU"
        )
    return _logits_loss(input, target, self)


# What is replaced for CPU tensors: where it is, its name, whose turn it is then.
_CPU_FUNCTIONS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("fla.modules.causal_conv1d.ops", "causal_conv1d", _causal_conv1d),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update", _causal_conv1d_update),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", _rms_norm_gated),
    ("fla.modules.norm.layernorm", "rms_norm", _rms_norm),
    ("fla.modules.activations.ops", "swiglu", _swiglu),
    ("fla.modules.activations.ops", "swiglu_linear", _swiglu_linear),
)
_CPU_LOSSES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("fla.modules.fused_linear_cross_entropy.ops", "FusedLinearCrossEntropyLoss", _linear_loss),
    ("fla.modules.fused_cross_entropy.ops", "FusedCrossEntropyLoss", _loss),
)


def _make_for_cpu(original: Any, name: str, ours: Callable[..., Any]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        first = next(tensors, None)
        if first is None or first.device.type != "cpu":
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return named(function, original, name)


def _targets(left: dict[str, str]) -> list[Target]:
    targets: list[Target] = []

    def add(owner: Any, name: str, title: str, note: str, make: Callable[[Any, str], Any]) -> None:
        if name not in vars(owner):
            left[title] = "not in this version"
            return
        put = _switch.held(owner, name)
        if put is None:
            put = make(vars(owner)[name], name)
        packages = () if isinstance(owner, type) else _PACKAGES
        targets.append(Target(owner, name, put, title, note, packages))

    no_registry = _register()
    for name, (folder, ours) in _OPERATORS.items():
        title = f"fla.ops.{folder}.{name}"
        note = f"{ours.__module__}.{ours.__name__}"
        if name in _REGISTERED and no_registry is None:
            continue
        module = importlib.import_module(f"fla.ops.{folder}")
        add(module, name, title, note, _make_operator)
    if no_registry is None:
        title = " and ".join(_REGISTERED) + " in fla.backends"
        targets.append(Target(_backend(), "active", True, title, "the backend 'deltic'"))

    for place, name, ours in (*_CPU_FUNCTIONS, *_CPU_LOSSES):

        def make(original: Any, name: str, ours: Callable[..., Any] = ours) -> Any:
            return _make_for_cpu(original, name, ours)

        try:
            owner: Any = importlib.import_module(place)
        except ImportError:
            left[f"{place}.{name}"] = "not in this version"
            continue
        if ours in (_linear_loss, _loss):
            owner = vars(owner)[name]
            add(owner, "forward", f"{place}.{name}.forward", "torch, for CPU tensors", make)
        else:
            add(owner, name, f"{place}.{name}", "torch, for CPU tensors", make)
    return targets


def enable() -> Report:
    """Makes flash-linear-attention's delta-rule layers and models run on deltic's operators.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: flash-linear-attention, or Triton, which it imports, is not installed.
    """
    try:
        fla = importlib.import_module("fla")
        importlib.import_module("fla.ops.kda")
    except ImportError as error:
        raise ImportError(
            "deltic.integrations.fla: flash-linear-attention: expected an installed package "
            f"(pip install flash-linear-attention), got: {error}"
        ) from error
    left: dict[str, str] = {}
    targets = _targets(left)
    return _switch.turn_on(f"flash-linear-attention {fla.__version__}", targets, left)


def disable() -> Report:
    """Puts back everything that :func:`enable` replaced.

    Its backend stays in the registry and declines every call, as the registry has no way out.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    return _switch.turn_off("flash-linear-attention")
