"""Hugging Face transformers' models with delta-rule layers, on deltic's operators.

    >>> from deltic.integrations import transformers
    >>> report = transformers.enable()      # doctest: +SKIP
    >>> print(report)                       # doctest: +SKIP
    >>> transformers.disable()              # doctest: +SKIP

A model's module has functions for its layers as globals, and classes for its norms and gates; these
are replaced, so models that exist already change with those that are built later. What deltic does
not take goes to the function that was there before (see docs/transformers.md).

:func:`to_deltic` and :func:`from_deltic` move a layer's weights instead: into a module of
``deltic.layers``, and back.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _blocks
from .._conv import has_kernels
from ..fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ..fla.ops.kda import chunk_kda, fused_recurrent_kda
from ..layers._norms import GATE_ACTIVATIONS, rms_norm
from ._modules import ACTIVATIONS, causal_conv, conv_step, offsets_of, takes_weight
from ._patch import Report, Switch, Target, named, say_once, warn_once
from ._weights import from_deltic, to_deltic

__all__ = ["MODELS", "disable", "enable", "from_deltic", "to_deltic"]

MODELS = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "kimi_linear",
    "glm5_next",
    "bailing_hybrid",
)
_switch = Switch()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_KEY_WIDTH = 256

_ROWS = ("query", "key", "value", "g", "beta")
_STATES = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")


def _refusal(query: Tensor, value: Tensor, keywords: set[str]) -> str | None:
    """Why a call goes to the original without being tried."""
    if query.dtype not in _DTYPES or value.dtype not in _DTYPES:
        return f"{query.dtype} queries and {value.dtype} values"
    if query.shape[-1] > _MAX_KEY_WIDTH:
        return f"keys wider than {_MAX_KEY_WIDTH}"
    return f"the keyword {sorted(keywords)[0]!r}" if keywords else None


def _make_rule(ours: Callable[..., Any], chunked: bool) -> Callable[[Any, str], Any]:
    """Makes a replacement of a function over whole sequences, or one that goes by tokens."""
    # What these would change in the result nobody here has asked for: the original knows.
    signature = inspect.signature(ours).parameters.values()
    others = {p.name for p in signature if p.kind is not p.VAR_KEYWORD}
    others -= {"q", "k", "v", "g", "beta", *_STATES, "cu_seqlens"}

    def make(original: Any, name: str) -> Any:
        def call(
            rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
            initial_state: Tensor | None,
            output_final_state: bool,
            use_qk_l2norm_in_kernel: bool,
            keywords: dict[str, Any],
        ) -> Any:
            query, key, value, g, beta = rows
            options = dict(
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            reason = _refusal(query, value, others & keywords.keys())
            if reason is None:
                offsets = keywords.get("cu_seqlens")
                if offsets is None:
                    offsets = keywords.get("cu_seq_lens_q")
                state = None if initial_state is None else initial_state.float()
                try:
                    o, last = ours(
                        query,
                        key,
                        value,
                        g=g,
                        beta=beta,
                        **{**options, "initial_state": state},
                        cu_seqlens=offsets,
                    )
                    return o.to(query.dtype), last
                except NotImplementedError as error:
                    reason = str(error).splitlines()[0]
            if not torch.compiler.is_compiling():
                say_once(name, reason)
            return original(query, key, value, g=g, beta=beta, **options, **keywords)

        def whole(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,  # changes the rounding only: not passed on
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            rows = (query, key, value, g, beta)
            result: tuple[Tensor, Tensor | None] = call(
                rows, initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs
            )
            return result

        def by_token(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            return whole(
                query,
                key,
                value,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **kwargs,
            )

        return named(whole if chunked else by_token, original, name)

    return make


def _check_end(function: str, offsets: Tensor, tokens: int) -> None:
    """Packed sequences fill their row: whose inputs of earlier tokens would be nobody knows."""
    expected = (
        f"{function}: cu_seq_lens_q: expected offsets that end at the row's {tokens} tokens "
        "(packed sequences have no cache of earlier ones: use_cache=False)"
    )
    if torch.compiler.is_compiling() or offsets.is_cuda:  # nobody waits for the GPU
        torch._assert_async(offsets[-1] == tokens, f"{expected}, got others")
    elif int(offsets[-1]) != tokens:
        raise ValueError(f"{expected}, got {int(offsets[-1])}")


def _make_convolution(original: Any, name: str) -> Any:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        batch, channels, tokens = hidden_states.shape
        seq_idx, offsets = kwargs.get("seq_idx"), kwargs.get("cu_seqlens")
        if offsets is None:
            offsets = kwargs.get("cu_seq_lens_q")
        reason = None
        if not has_kernels(hidden_states):
            reason = f"{hidden_states.device.type} tensors"
        elif hidden_states.dtype not in _DTYPES:
            reason = f"{hidden_states.dtype} tensors"
        elif not takes_weight(weight):
            reason = f"a convolution of {weight.shape[-1]} taps"
        elif activation not in ACTIVATIONS:
            reason = f"the activation {activation!r}"
        elif seq_idx is not None and seq_idx.shape != (batch, tokens):
            reason = "`seq_idx` and states of earlier tokens"
        if reason is not None:
            if not torch.compiler.is_compiling():
                say_once(name, reason)
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        rows = hidden_states.transpose(1, 2)
        # One sequence needs no offsets. They count its new tokens only, and with a cache the row
        # starts with inputs of earlier ones.
        is_one = offsets is not None and batch == 1 and len(offsets) == 2
        if seq_idx is None and (offsets is None or is_one):
            y, _ = causal_conv(rows, weight, bias, activation)
            return y.transpose(1, 2)
        if seq_idx is not None:
            offsets = offsets_of(seq_idx)
        elif offsets is not None:
            _check_end(name, offsets, batch * tokens)
        packed = rows.reshape(1, batch * tokens, channels)
        y, _ = causal_conv(packed, weight, bias, activation, cu_seqlens=offsets)
        return y.view(batch, tokens, channels).transpose(1, 2)

    return named(causal_conv1d_fn, original, name)


def _make_convolution_step(original: Any, name: str) -> Any:
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        ours = (
            has_kernels(hidden_states)
            and hidden_states.dtype in _DTYPES
            and hidden_states.dim() == 3
            and hidden_states.shape[-1] == 1
            and activation in ACTIVATIONS
            and takes_weight(weight)
            and not torch.is_grad_enabled()
            and not kwargs
        )
        if not ours:
            return original(hidden_states, conv_state, weight, bias, activation, **kwargs)
        y = conv_step(hidden_states.squeeze(-1), conv_state, weight, bias, activation)
        return y.unsqueeze(-1)

    return named(causal_conv1d_update, original, name)


def _make_norm(original: Any, name: str) -> Any:
    def forward(self: Any, hidden_states: Tensor, *gates: Any, **keywords: Any) -> Any:
        gate = gates[0] if gates else keywords.get("gate")
        if (
            len(gates) + len(keywords) != 1
            or not isinstance(gate, Tensor)
            or gate.shape != hidden_states.shape  # the original broadcasts
            or not has_kernels(hidden_states)
            or hidden_states.dtype not in _DTYPES
            or self.activation not in GATE_ACTIVATIONS
        ):
            return original(self, hidden_states, *gates, **keywords)
        is_sigmoid = self.activation == "sigmoid"
        return rms_norm(hidden_states, self.weight, gate, self.variance_epsilon, is_sigmoid)

    return named(forward, original, name)


def _make_forget_gate(original: Any, name: str) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        if not has_kernels(hidden_states) or hidden_states.dtype not in _DTYPES:
            return original(self, hidden_states)
        if hasattr(self, "f_proj"):  # one projection, and the gate in the layer's dtype
            raw, dtype = self.f_proj(hidden_states), hidden_states.dtype
            bound = self.lower_bound if self.safe_gate else None
        else:
            raw, dtype = self.f_b_proj(self.f_a_proj(hidden_states)), torch.float32
            bound = getattr(self, "safe_gate_lower_bound", None)
        return _blocks.log_decay(
            raw.view(*raw.shape[:2], self.num_heads, self.head_dim),
            gate="softplus" if bound is None else "bounded",
            A_log=self.A_log.flatten(),
            dt_bias=self.dt_bias,
            lower_bound=bound,
            dtype=dtype,
        )

    return named(forward, original, name)


def _is_packed(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether positions start again inside a row, between tokens that are no padding."""
    if positions.dim() == 3:  # one row per axis of images: that of text comes first
        positions = positions[0]
    if positions.dim() != 2 or positions.shape[1] < 2:
        return False
    starts = (positions[:, 1:] == 0) & (positions[:, :-1] > 0)
    if mask is not None and mask.dim() == 2 and mask.shape[1] >= positions.shape[1]:
        used = mask[:, -positions.shape[1] :] != 0
        starts = starts & used[:, 1:] & used[:, :-1]
    return bool(starts.any())


def _make_model(original: Any, name: str) -> Any:
    """A model's forward that keeps packed sequences away from caches, or says that they mix.

    Both are about what transformers does between the functions above: its mask for softmax
    attention takes sequences from ``position_ids``, and only where there is neither a cache nor a
    mask; the layers of linear attention take them from offsets. A look at ``position_ids`` takes
    tens of microseconds on the CPU and waits for a GPU, where only the first call is looked at;
    compiled code is not.
    """
    places = {parameter: i for i, parameter in enumerate(_parameters(original))}
    is_watched = True

    def given(args: tuple[Any, ...], kwargs: dict[str, Any], key: str) -> Any:
        place = places.get(key, 0) - 1  # without self
        return args[place] if 0 <= place < len(args) else kwargs.get(key)

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_watched
        positions, mask = given(args, kwargs, "position_ids"), given(args, kwargs, "attention_mask")
        if not isinstance(positions, Tensor):
            return
        is_watched = positions.device.type == "cpu"
        if _is_packed(positions, mask if isinstance(mask, Tensor) else None):
            is_watched = False
            warn_once(
                "packed sequences: position_ids start again inside a row, without "
                "cu_seq_lens_q: convolution and recurrence run on from one sequence into the "
                "next (docs/transformers.md)"
            )

    def without_cache(
        self: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> dict[str, Any]:
        """The keywords of a call with several packed sequences, for which no cache is made."""
        wanted = given(args, kwargs, "use_cache")
        # With gradient checkpointing transformers makes none, and says so.
        is_checkpointed = getattr(self, "gradient_checkpointing", False) and self.training
        past = given(args, kwargs, "past_key_values")
        if past is not None or (wanted and not is_checkpointed):
            raise ValueError(
                f"{type(self).__name__}: cu_seq_lens_q: {count} packed sequences have no cache, "
                "which holds one state per row: expected use_cache=False, got "
                + ("use_cache=True" if past is None else "past_key_values")
            )
        is_quiet = torch.compiler.is_compiling()
        if wanted is None and getattr(self.config, "use_cache", None):
            if not is_quiet:
                warn_once(
                    "packed sequences: no cache is made for a call with several of them in "
                    "cu_seq_lens_q: pass use_cache=False (docs/transformers.md)"
                )
            kwargs = {**kwargs, "use_cache": False}  # by place transformers does not take it
        is_flash = "flash" in str(getattr(self.config, "_attn_implementation", ""))
        mask = given(args, kwargs, "attention_mask")
        is_masked = isinstance(mask, Tensor) and mask.dim() == 2
        if not is_flash and not is_quiet:
            positions = given(args, kwargs, "position_ids")
            # Three axes are those of images, without the text's.
            if is_masked or positions is None or (positions.dim() == 3 and len(positions) == 3):
                warn_once(
                    "packed sequences: softmax attention keeps them apart by position_ids without "
                    "an attention_mask, got "
                    + ("an attention_mask" if is_masked else "no position_ids of text")
                    + " (docs/transformers.md)"
                )
        return kwargs

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        offsets = kwargs.get("cu_seq_lens_q")
        if offsets is None:
            offsets = kwargs.get("cu_seqlens")
        if isinstance(offsets, Tensor):
            if offsets.shape[0] > 2:
                kwargs = without_cache(self, args, kwargs, offsets.shape[0] - 1)
        elif is_watched and not torch.compiler.is_compiling():
            look(args, kwargs)
        return original(self, *args, **kwargs)

    return named(forward, original, name)


# A function's name: what makes its replacement, the parameters it must have, what does its work.
_FUNCTIONS: dict[str, tuple[Callable[[Any, str], Any], tuple[str, ...], str]] = {
    "torch_chunk_gated_delta_rule": (
        _make_rule(chunk_gated_delta_rule, True),
        (*_ROWS, "chunk_size", *_STATES),
        "deltic.fla.ops.gated_delta_rule.chunk_gated_delta_rule",
    ),
    "torch_recurrent_gated_delta_rule": (
        _make_rule(fused_recurrent_gated_delta_rule, False),
        (*_ROWS, *_STATES),
        "deltic.fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
    ),
    "chunk_kimi_delta_attention": (
        _make_rule(chunk_kda, True),
        (*_ROWS, "chunk_size", *_STATES),
        "deltic.fla.ops.kda.chunk_kda",
    ),
    "recurrent_kimi_delta_attention": (
        _make_rule(fused_recurrent_kda, False),
        (*_ROWS, *_STATES),
        "deltic.fla.ops.kda.fused_recurrent_kda",
    ),
    "causal_conv1d_fn": (
        _make_convolution,
        ("hidden_states", "weight", "bias", "activation"),
        "deltic.causal_conv1d",
    ),
    "causal_conv1d_update": (
        _make_convolution_step,
        ("hidden_states", "conv_state", "weight", "bias", "activation"),
        "deltic.causal_conv1d_update",
    ),
}
# Likewise for the forward of classes, by the end of their names.
_CLASSES: dict[str, tuple[Callable[[Any, str], Any], tuple[str, ...], str]] = {
    "RMSNormGated": (_make_norm, ("self", "hidden_states", "gate"), "deltic.rms_norm"),
    "ForgetGate": (_make_forget_gate, ("self", "hidden_states"), "deltic.log_decay"),
}


def _parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters, without the one that takes all other keywords."""
    is_module = isinstance(function, torch.nn.Module)  # what the package `kernels` makes of it
    signature = inspect.signature(type(function).forward if is_module else inspect.unwrap(function))
    found = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    return tuple(found[1:] if is_module else found)


def _models_in(module: ModuleType) -> dict[str, Any]:
    """The classes that run a module's layers over text; of images and text, the one for text."""
    wanted = {"position_ids", "attention_mask", "inputs_embeds"}
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and name.endswith("Model")
        and "forward" in vars(value)
        and wanted <= set(_parameters(vars(value)["forward"]))
    }
    text = {name: value for name, value in found.items() if name.endswith("TextModel")}
    return text or found


def _targets_in(module: ModuleType, model: str, left: dict[str, str]) -> list[Target]:
    """What can be replaced in a model's module; what cannot goes to `left` with the reason."""
    targets = []

    def add(owner: Any, name: str, row: Any, title: str) -> None:
        make, expected, note = row
        original = vars(owner)[name]
        put = _switch.held(owner, name)
        if put is None:
            parameters = _parameters(original)
            if parameters != expected:
                left[title] = f"expected the parameters {expected}, got {parameters}"
                return
            put = make(original, name)
        targets.append(Target(owner, name, put, title, note))

    for name, row in _FUNCTIONS.items():
        if name in vars(module):
            add(module, name, row, f"{model}: {name}")
    for name, value in vars(module).items():
        for end, row in _CLASSES.items():
            mine = isinstance(value, type) and value.__module__ == module.__name__
            if mine and name.endswith(end) and "forward" in vars(value):
                add(value, "forward", row, f"{model}: {name}.forward")
    if not any(target.name in _FUNCTIONS for target in targets):
        left.setdefault(model, "has none of the functions that deltic knows")
        return targets
    for name, value in _models_in(module).items():
        original = vars(value)["forward"]
        put = _switch.held(value, "forward") or _make_model(original, "forward")
        note = "the same, without a cache of packed sequences; warns of position_ids alone"
        targets.append(Target(value, "forward", put, f"{model}: {name}.forward", note))
    return targets


def enable(models: str | Iterable[str] | None = None) -> Report:
    """Makes transformers' models run on deltic's operators.

    Args:
        models: names out of ``MODELS``; by default all that the installed version has.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: no name, or one that is not in ``MODELS``.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "deltic.integrations.transformers: transformers: expected an installed package "
            f"(pip install transformers), got: {error}"
        ) from error
    if models is not None and not isinstance(models, Iterable):
        raise TypeError(
            f"enable: models: expected None, or names out of {', '.join(MODELS)}, "
            f"got {type(models).__name__}"
        )
    chosen = MODELS if models is None else (models,) if isinstance(models, str) else tuple(models)
    for model in chosen:
        if model not in MODELS:
            raise ValueError(
                f"enable: models: expected names out of {', '.join(MODELS)}, got {model!r}"
            )
    left: dict[str, str] = {}
    targets: list[Target] = []
    for model in chosen:
        path = f"transformers.models.{model}.modeling_{model}"
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and (error.name or "") in path
            there = f"not in transformers {transformers.__version__}"
            left[model] = there if missing else f"cannot be imported: {error}"
            continue
        targets += _targets_in(module, model, left)
    return _switch.turn_on(f"transformers {transformers.__version__}", targets, left)


def disable() -> Report:
    """Puts back everything that :func:`enable` replaced.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    return _switch.turn_off("transformers")
