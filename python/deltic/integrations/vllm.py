"""vLLM's layers with the delta rule, on deltic's operators.

    >>> from deltic.integrations import vllm
    >>> print(vllm.enable())      # doctest: +SKIP
    >>> vllm.disable()            # doctest: +SKIP

Where deltic is installed beside vLLM, :func:`register` does it in every process of the server, when
the model's layers are imported (entry point ``vllm.general_plugins``; the environment variable
``VLLM_PLUGINS`` chooses among plugins).

The core of a layer, between its projections, is replaced as a whole: the convolution and the
recurrence run on vLLM's pools as they are, with slot 0 as none, and write into the layer's output.
What deltic does not take goes to what was there before, and a line in the log says why.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from ._patch import Report, Target
from ._plugin import Plugin
from ._serving import other_arguments
from ._vllm_core import (
    lacking,
    make_channel_core,
    make_head_core,
    make_no_warmup,
    make_normed_core,
    rule_of,
)
from ._vllm_functions import FUNCTIONS

__all__ = ["disable", "enable", "register"]


_LAYERS = "vllm.model_executor.layers.mamba.gdn"
_QWEN = f"{_LAYERS}.qwen_gdn_linear_attn"
_OLMO = f"{_LAYERS}.olmo_gdn_linear_attn"
_KIMI = f"{_LAYERS}.kimi_gdn_linear_attn"

# ---- What is replaced where ----------------------------------------------------------------------


_HEAD_ARGUMENTS = ("self", "mixed_qkv", "b", "a", "core_attn_out")
_NORMED_ARGUMENTS = ("self", "mixed_qkv", "b", "a", "output_gate", "core_attn_out")
_CHANNEL_ARGUMENTS = ("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
# Methods of a layer's class: module, class, method, its arguments, what makes the replacement.
_METHODS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    (_QWEN, "QwenGatedDeltaNetAttention", "_forward_core", _HEAD_ARGUMENTS, make_head_core),
    (
        _QWEN,
        "QwenGatedDeltaNetAttention",
        "_forward_core_fused_norm",
        _NORMED_ARGUMENTS,
        make_normed_core,
    ),
    (
        _QWEN,
        "QwenGatedDeltaNetAttention",
        "_warmup_prefill_kernels",
        ("self",),
        lambda _: make_no_warmup,
    ),
    (_OLMO, "OlmoHybridGatedDeltaNetAttention", "_forward_core", _HEAD_ARGUMENTS, make_head_core),
    (_KIMI, "KimiGatedDeltaNetAttention", "_forward", _CHANNEL_ARGUMENTS, make_channel_core),
)


def _made(owner: Any, name: str, make: Callable[[Any, str], Any]) -> Any:
    """What was put there before, or a new replacement."""
    put = _plugin.switch.held(owner, name)
    return make(vars(owner)[name], name) if put is None else put


def _method_targets(module: Any, left: dict[str, str]) -> list[Target]:
    targets = []
    for place, class_name, name, arguments, makes in _METHODS:
        if place != module.__name__:
            continue
        title, owner = f"{class_name}.{name}", getattr(module, class_name, None)
        method = None if owner is None else vars(owner).get(name)
        if method is None:
            left[title] = "not in this version"
            continue
        reason = lacking(module)
        if reason is None and _plugin.switch.held(owner, name) is None:
            reason = other_arguments(method, arguments) if len(arguments) > 1 else None
        if reason is not None:
            left[title] = reason
            continue
        targets.append(Target(owner, name, _made(owner, name, makes(module)), title, "deltic"))
    return targets


@cache
def _rule(module: Any) -> Any:
    return rule_of(module)


def _rule_target(module: Any, left: dict[str, str]) -> list[Target]:
    """The operator over prompts, through vLLM's registry of classes from elsewhere."""
    title = "ChunkGatedDeltaRule"
    registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    if not hasattr(module, title):
        left[title] = "not in this version"
        return []
    taken = registry.get(title)
    if taken is not None and taken is not _rule(module):
        left[title] = f"{taken.__module__}.{taken.__name__} is registered for it"
        return []
    return [Target(registry, title, _rule(module), title, "deltic.delta_rule")]


def _targets_of(module: Any, left: dict[str, str]) -> list[Target]:
    targets = _method_targets(module, left)
    if module.__name__ == _QWEN:
        targets += _rule_target(module, left)
    for function in FUNCTIONS.get(module.__name__, ()):
        title = f"{module.__name__.removeprefix('vllm.')}.{function.name}"
        if function.name not in vars(module):
            left[title] = "not in this version"
            continue
        put = _made(module, function.name, function.make())
        targets.append(Target(module, function.name, put, title, function.note))
    return targets


_plugin = Plugin(
    package="vllm",
    product="vLLM",
    oldest="0.32",
    parts="layers",
    logger="vllm.deltic",  # vLLM shows what its own loggers say
    modules=(_QWEN, _OLMO, _KIMI, *FUNCTIONS),
    targets=_targets_of,
)


def enable() -> Report:
    """Makes vLLM's delta-rule layers run on deltic's operators, in this process.

    Models that exist already change with those that are built later.

    Returns:
        A report: ``str()`` of it says what was replaced by what, and what was not and why. As a
        context manager it puts back at its end what this call replaced.

    Raises:
        ImportError: vLLM is not installed, or a version without these layers.
    """
    return _plugin.enable()


def disable() -> Report:
    """Puts back everything that :func:`enable` or :func:`register` replaced.

    Operators that vLLM has made since keep their class.

    Returns:
        A report of what was put back. As a context manager it replaces that again at its end.
    """
    return _plugin.disable()


def register() -> None:
    """What vLLM calls in each of its processes: :func:`enable` for layers as they are imported.

    A vLLM that is too old is left as it is, with a line in the log.
    """
    _plugin.register()
