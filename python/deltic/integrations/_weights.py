"""Weights of transformers' delta-rule layers as layers of deltic.layers, and back.

The two sides hold the same numbers. What differs are names, which matrices are stacked into one,
and in Qwen3-Next the order of a stacked matrix's rows; so both ways only move rows, bit by bit.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._native import is_eps
from ..layers import GatedDeltaNet, KimiDeltaAttention

Weights = dict[str, Tensor]
Layer = GatedDeltaNet | KimiDeltaAttention
_ACTIVATIONS = ("silu", "swish")


class Sizes(NamedTuple):
    """What a layer's shapes follow from."""

    hidden: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    eps: float

    @property
    def keys(self) -> int:
        return self.heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def group(self) -> int:
        return self.value_heads // self.heads


class Format(NamedTuple):
    """How a model names and stacks the weights of its layers."""

    sign: str  # a weight that no other model has
    kind: type[Layer]
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    to_ours: Callable[[Weights, Sizes], Weights]
    from_ours: Callable[[Weights, Sizes], Weights]
    older: Mapping[str, str]  # names in published checkpoints that transformers changes on loading
    sizes: Mapping[str, tuple[str, ...]]  # where configurations and layers have them


def _fail(argument: str, expected: str, got: Any, function: str = "to_deltic") -> ValueError:
    return ValueError(f"{function}: {argument}: expected {expected}, got {got}")


# ---- Gated DeltaNet: Qwen3-Next and Qwen3.5 -----------------------------------------------------


def _gdn_common(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "conv1d.weight": (2 * s.keys + s.values, 1, s.taps),
        "A_log": (s.value_heads,),
        "dt_bias": (s.value_heads,),
        "norm.weight": (s.value_width,),
        "out_proj.weight": (s.hidden, s.values),
    }


def _next_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "in_proj_qkvz.weight": (2 * (s.keys + s.values), s.hidden),
        "in_proj_ba.weight": (2 * s.value_heads, s.hidden),
        **_gdn_common(s),
    }


def _split_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "in_proj_qkv.weight": (2 * s.keys + s.values, s.hidden),
        "in_proj_z.weight": (s.values, s.hidden),
        "in_proj_b.weight": (s.value_heads, s.hidden),
        "in_proj_a.weight": (s.value_heads, s.hidden),
        **_gdn_common(s),
    }


def _by_groups(weight: Tensor, s: Sizes, rows: Iterable[int]) -> list[Tensor]:
    """The parts of a matrix that has, for each key head, so many rows of each part."""
    parts = weight.view(s.heads, -1, s.hidden).split(list(rows), dim=1)
    return [part.reshape(-1, s.hidden) for part in parts]


def _in_groups(parts: Iterable[Tensor], s: Sizes) -> Tensor:
    return torch.cat([part.reshape(s.heads, -1, s.hidden) for part in parts], dim=1).flatten(0, 1)


def _convolutions(weight: Tensor, s: Sizes) -> Weights:
    q, k, v = weight.split([s.keys, s.keys, s.values])
    return {"q_conv1d.weight": q, "k_conv1d.weight": k, "v_conv1d.weight": v}


def _stacked(ours: Weights, end: str) -> Tensor:
    return torch.cat([ours[f"{x}_{end}.weight"] for x in "qkv"])


def _gdn_to_ours(theirs: Weights, s: Sizes) -> Weights:
    return {
        **_convolutions(theirs["conv1d.weight"], s),
        "A_log": theirs["A_log"],
        "dt_bias": theirs["dt_bias"],
        "o_norm.weight": theirs["norm.weight"],
        "o_proj.weight": theirs["out_proj.weight"],
    }


def _gdn_from_ours(ours: Weights) -> Weights:
    return {
        "conv1d.weight": _stacked(ours, "conv1d"),
        "A_log": ours["A_log"],
        "dt_bias": ours["dt_bias"],
        "norm.weight": ours["o_norm.weight"],
        "out_proj.weight": ours["o_proj.weight"],
    }


def _next_rows(s: Sizes) -> tuple[int, ...]:
    values = s.group * s.value_width
    return s.key_width, s.key_width, values, values


def _next_to_ours(theirs: Weights, s: Sizes) -> Weights:
    q, k, v, z = _by_groups(theirs["in_proj_qkvz.weight"], s, _next_rows(s))
    b, a = _by_groups(theirs["in_proj_ba.weight"], s, (s.group, s.group))
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    found = {f"{name}.weight": x for name, x in zip(names, (q, k, v, z, b, a), strict=True)}
    return found | _gdn_to_ours(theirs, s)


def _next_from_ours(ours: Weights, s: Sizes) -> Weights:
    rows = [ours[f"{name}_proj.weight"] for name in "qkvg"]
    return {
        "in_proj_qkvz.weight": _in_groups(rows, s),
        "in_proj_ba.weight": _in_groups((ours["b_proj.weight"], ours["a_proj.weight"]), s),
        **_gdn_from_ours(ours),
    }


def _split_to_ours(theirs: Weights, s: Sizes) -> Weights:
    q, k, v = theirs["in_proj_qkv.weight"].split([s.keys, s.keys, s.values])
    return {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "g_proj.weight": theirs["in_proj_z.weight"],
        "b_proj.weight": theirs["in_proj_b.weight"],
        "a_proj.weight": theirs["in_proj_a.weight"],
        **_gdn_to_ours(theirs, s),
    }


def _split_from_ours(ours: Weights, s: Sizes) -> Weights:
    return {
        "in_proj_qkv.weight": _stacked(ours, "proj"),
        "in_proj_z.weight": ours["g_proj.weight"],
        "in_proj_b.weight": ours["b_proj.weight"],
        "in_proj_a.weight": ours["a_proj.weight"],
        **_gdn_from_ours(ours),
    }


# ---- Kimi Delta Attention -----------------------------------------------------------------------

_KIMI_NAMES = {
    "q_proj.weight": "q_proj.weight",
    "k_proj.weight": "k_proj.weight",
    "v_proj.weight": "v_proj.weight",
    "b_proj.weight": "b_proj.weight",
    "forget_gate.f_a_proj.weight": "f_proj.0.weight",
    "forget_gate.f_b_proj.weight": "f_proj.1.weight",
    "forget_gate.dt_bias": "dt_bias",
    "forget_gate.A_log": "A_log",
    "g_a_proj.weight": "g_proj.0.weight",
    "g_b_proj.weight": "g_proj.1.weight",
    "o_norm.weight": "o_norm.weight",
    "o_proj.weight": "o_proj.weight",
}


def _kimi_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    rows = {f"{name}_proj.weight": (s.keys, s.hidden) for name in "qkv"}
    return {
        **rows,
        "conv1d.weight": (3 * s.keys, 1, s.taps),
        "forget_gate.f_a_proj.weight": (s.key_width, s.hidden),
        "forget_gate.f_b_proj.weight": (s.keys, s.key_width),
        "forget_gate.dt_bias": (s.keys,),
        "forget_gate.A_log": (1, 1, s.heads, 1),
        "b_proj.weight": (s.heads, s.hidden),
        "g_a_proj.weight": (s.key_width, s.hidden),
        "g_b_proj.weight": (s.keys, s.key_width),
        "o_norm.weight": (s.key_width,),
        "o_proj.weight": (s.hidden, s.keys),
    }


def _kimi_to_ours(theirs: Weights, s: Sizes) -> Weights:
    found = {ours: theirs[name] for name, ours in _KIMI_NAMES.items()}
    found["A_log"] = found["A_log"].flatten()
    found["g_proj.1.bias"] = found["g_proj.1.weight"].new_zeros(s.keys)
    return found | _convolutions(theirs["conv1d.weight"], s)


def _kimi_from_ours(ours: Weights, s: Sizes) -> Weights:
    bias = ours["g_proj.1.bias"]
    if bias.device.type != "meta" and bool(bias.count_nonzero()):
        raise _fail("g_proj.1.bias", "zeros (the model has no bias there)", "others", "from_deltic")
    found = {name: ours[name_here] for name, name_here in _KIMI_NAMES.items()}
    found["forget_gate.A_log"] = found["forget_gate.A_log"].view(1, 1, s.heads, 1)
    return found | {"conv1d.weight": _stacked(ours, "conv1d")}


# ---- Both ways ----------------------------------------------------------------------------------

_GDN_SIZES = {
    "hidden": ("hidden_size",),
    "heads": ("linear_num_key_heads", "num_k_heads"),
    "value_heads": ("linear_num_value_heads", "num_v_heads"),
    "key_width": ("linear_key_head_dim", "head_k_dim"),
    "value_width": ("linear_value_head_dim", "head_v_dim"),
    "taps": ("linear_conv_kernel_dim", "conv_kernel_size"),
    "eps": ("rms_norm_eps", "layer_norm_epsilon"),
}
_KIMI_SIZES = {
    "hidden": ("hidden_size",),
    # A published configuration has these in `linear_attn_config`.
    "heads": ("linear_num_heads", "linear_attn_config.num_heads", "num_heads"),
    "value_heads": ("linear_num_heads", "linear_attn_config.num_heads", "num_heads"),
    "key_width": ("linear_head_dim", "linear_attn_config.head_dim", "head_dim"),
    "value_width": ("linear_head_dim", "linear_attn_config.head_dim", "head_dim"),
    "taps": (
        "linear_conv_kernel_dim",
        "linear_attn_config.short_conv_kernel_size",
        "conv_kernel_size",
    ),
    "eps": ("rms_norm_eps", "layer_norm_epsilon"),
}
_QWEN3_5 = Format(
    "in_proj_qkv.weight",
    GatedDeltaNet,
    _split_shapes,
    _split_to_ours,
    _split_from_ours,
    {},
    _GDN_SIZES,
)
FORMATS: dict[str, Format] = {
    "qwen3_next": Format(
        "in_proj_qkvz.weight",
        GatedDeltaNet,
        _next_shapes,
        _next_to_ours,
        _next_from_ours,
        {},
        _GDN_SIZES,
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "kimi_linear": Format(
        "forget_gate.f_a_proj.weight",
        KimiDeltaAttention,
        _kimi_shapes,
        _kimi_to_ours,
        _kimi_from_ours,
        {
            "f_a_proj.weight": "forget_gate.f_a_proj.weight",
            "f_b_proj.weight": "forget_gate.f_b_proj.weight",
            "dt_bias": "forget_gate.dt_bias",
            "A_log": "forget_gate.A_log",
        },
        _KIMI_SIZES,
    ),
}


def _looked_up(config: Any, path: str) -> Any:
    """A value of a configuration, a dictionary or a layer; None where there is none."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _sizes(config: Any, form: Format) -> Sizes:
    """The sizes that a configuration or a layer has, checked."""
    inner = _looked_up(config, "text_config")
    config = config if inner is None else inner
    found: dict[str, Any] = {}
    for field, paths in form.sizes.items():
        values = (_looked_up(config, path) for path in paths)
        value = next((x for x in values if x is not None), None)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (is_eps(value) if field == "eps" else is_size):
            expected = "a whole number of at least 1"
            if field == "eps":
                expected = "a finite number of at least 0"
            raise _fail(f"config.{paths[0]}", expected, "none" if value is None else repr(value))
        found[field] = value
    s = Sizes(**found)
    if s.value_heads % s.heads != 0:
        name = f"config.{form.sizes['value_heads'][0]}"
        raise _fail(name, f"a multiple of {s.heads} key heads", s.value_heads)
    activation = _looked_up(config, "hidden_act") or _looked_up(config, "activation") or "silu"
    if activation not in _ACTIVATIONS:
        raise _fail("config.hidden_act", "'silu'", repr(activation))
    return s


def _chosen(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
    if not found:
        if not weights:
            raise _fail("source", "a model's weights by their names", "no weights at all")
        got = f"others, such as {next(iter(weights))!r}"
        raise _fail("source", f"weights whose names start with {prefix!r}", got)
    return found


def _model_of(weights: Mapping[str, Any]) -> str:
    for model, form in FORMATS.items():
        older = next((name for name, ours in form.older.items() if ours == form.sign), form.sign)
        if form.sign in weights or older in weights:
            return model
    *signs, last = dict.fromkeys(form.sign for form in FORMATS.values())
    sign = f"{', '.join(signs)} or {last}"
    got = ", ".join(list(weights)[:3]) or "none"
    raise _fail(
        "source", f"the weights of one layer (with {sign}), or a prefix that chooses one", got
    )


def _checked(weights: dict[str, Any], form: Format, s: Sizes) -> Weights:
    """The weights under transformers' names, each there once, and of its shape."""
    found: dict[str, Any] = {form.older.get(name, name): x for name, x in weights.items()}
    apart = [f"{x}_conv1d.weight" for x in "qkv"]
    if all(name in found for name in apart) and "conv1d.weight" not in found:
        for name in apart:
            if not isinstance(found[name], Tensor) or found[name].dim() != 3:
                raise _fail(name, "a tensor of 3 dimensions", _shown(found[name]))
        found["conv1d.weight"] = torch.cat([found.pop(name) for name in apart])
    shapes = form.shapes(s)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise _fail("source", f"also {', '.join(missing)}", "none of that name")
    extra = [name for name in found if name not in shapes]
    if extra:
        raise _fail("source", f"{', '.join(shapes)} alone", f"also {', '.join(extra)}")
    for name, shape in shapes.items():
        x = found[name]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = _shown(x) if not isinstance(x, Tensor) else str(x.dtype).removeprefix("torch.")
            raise TypeError(f"to_deltic: {name}: expected a floating-point tensor, got {got}")
        # Checkpoints have A_log with and without dimensions of one element.
        is_flat = name.endswith("A_log") and x.numel() == s.value_heads
        if tuple(x.shape) != shape and not is_flat:
            raise _fail(name, f"shape {list(shape)}", list(x.shape))
    return {name: x.detach() for name, x in found.items()}


def _shown(x: Any) -> str:
    return f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def to_deltic(
    source: nn.Module | Mapping[str, Tensor],
    config: Any = None,
    *,
    prefix: str = "",
    layer_idx: int | None = None,
) -> Layer:
    """A layer of :mod:`deltic.layers` with the weights of one of transformers' layers.

    Args:
        source: the layer (``model.model.layers[0].linear_attn``, in Kimi-Linear ``self_attn``), or
            weights by name: its ``state_dict()``, or with ``prefix`` a model's or a checkpoint's.
        config: the model's configuration, an object or a dictionary; by default what the layer says
            of itself. Weights need one.
        prefix: what the names of the layer's weights start with, for example
            ``"model.layers.0.linear_attn."``.
        layer_idx: the layer's place in a cache, by default that of ``source``.

    Returns:
        A :class:`GatedDeltaNet` (Qwen3-Next, Qwen3.5) or :class:`KimiDeltaAttention` (Kimi-Linear)
        with copies of the weights, in their dtypes and on their devices.

    Raises:
        ValueError: weights that are missing, too many or of another shape, by name; a configuration
            that the layer does not take.
        TypeError: a source of another kind, weights that are no floating-point tensors.

    >>> import torch
    >>> from deltic.integrations.transformers import from_deltic, to_deltic
    >>> from deltic.layers import GatedDeltaNet
    >>> layer = GatedDeltaNet(hidden_size=32, head_dim=8, expand_v=1, num_heads=2, num_v_heads=4)
    >>> config = dict(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
    ...     linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
    ...     rms_norm_eps=1e-5)
    >>> same = to_deltic(from_deltic(layer, "qwen3_next"), config)
    >>> x = torch.randn(1, 20, 32)
    >>> torch.equal(layer(x)[0], same(x)[0])
    True
    """
    if not isinstance(prefix, str):
        raise TypeError(f"to_deltic: prefix: expected a text, got {type(prefix).__name__}")
    if isinstance(source, nn.Module):
        if config is None and not prefix:
            config = source
        if layer_idx is None and not prefix:
            layer_idx = getattr(source, "layer_idx", None)
        source = source.state_dict()
    if not isinstance(source, Mapping) or not all(isinstance(name, str) for name in source):
        raise TypeError(
            f"to_deltic: source: expected a layer or weights by name, got {type(source).__name__}"
        )
    if config is None:
        raise _fail("config", "the model's configuration, beside weights by name", "none")
    weights = _chosen(source, prefix)
    form = FORMATS[_model_of(weights)]
    s = _sizes(config, form)
    ours = form.to_ours(_checked(weights, form, s), s)
    options: dict[str, Any] = dict(
        hidden_size=s.hidden,
        head_dim=s.key_width,
        expand_v=s.value_width / s.key_width,
        num_heads=s.heads,
        num_v_heads=s.value_heads,
        conv_size=s.taps,
        norm_eps=s.eps,
        layer_idx=layer_idx,
    )
    with torch.device("meta"):  # no memory, and no random numbers drawn, for what is replaced
        layer: Layer = form.kind(**options)
    ours = {name: x.clone(memory_format=torch.contiguous_format) for name, x in ours.items()}
    layer.load_state_dict(ours, assign=True)
    if isinstance(layer, KimiDeltaAttention):
        bias = layer.g_proj[1].bias
        assert isinstance(bias, Tensor)
        bias.requires_grad_(
            False
        )  # the model has none: it stays zero, so that the way back is open
    return layer


def from_deltic(layer: Layer, model: str) -> Weights:
    """The weights of a layer of :mod:`deltic.layers` as one of transformers' layers has them.

    Args:
        layer: a :class:`GatedDeltaNet` or :class:`KimiDeltaAttention`.
        model: ``"qwen3_next"``, ``"qwen3_5"``, ``"qwen3_5_moe"`` or ``"kimi_linear"``.

    Returns:
        A dictionary for ``load_state_dict`` of the model's layer: copies, in the layer's dtypes.
        After :func:`to_deltic` these are the bits it was given.

    Raises:
        ValueError: a layer with an option that the model does not have, or another model's.
        TypeError: no layer of the two kinds.

    >>> from deltic.integrations.transformers import from_deltic
    >>> from deltic.layers import GatedDeltaNet
    >>> layer = GatedDeltaNet(hidden_size=32, head_dim=8, num_heads=2)
    >>> sorted(from_deltic(layer, "qwen3_5"))[:3]
    ['A_log', 'conv1d.weight', 'dt_bias']
    """
    if not isinstance(layer, (GatedDeltaNet, KimiDeltaAttention)):
        raise TypeError(
            "from_deltic: layer: expected a GatedDeltaNet or a KimiDeltaAttention, "
            f"got {type(layer).__name__}"
        )
    if not isinstance(model, str) or model not in FORMATS:
        raise _fail("model", f"one of {', '.join(FORMATS)}", repr(model), "from_deltic")
    form = FORMATS[model]
    if not isinstance(layer, form.kind):
        got = type(layer).__name__
        raise _fail("layer", f"a {form.kind.__name__} for {model}", got, "from_deltic")
    wanted: dict[str, Any] = dict(use_short_conv=True, conv_bias=False, allow_neg_eigval=False)
    if isinstance(layer, GatedDeltaNet):
        wanted["use_gate"] = True
        activation = getattr(layer.o_norm, "activation", "swish")
        if activation not in _ACTIVATIONS:
            raise _fail("layer.output_gate_activation", "'swish'", repr(activation), "from_deltic")
    else:
        wanted |= dict(lower_bound=None, num_v_heads=layer.num_heads, head_v_dim=layer.head_k_dim)
    for name, value in wanted.items():
        if getattr(layer, name) != value:
            got = repr(getattr(layer, name))
            raise _fail(f"layer.{name}", f"{value!r} as {model} has it", got, "from_deltic")
    s = Sizes(
        layer.hidden_size,
        layer.num_heads,
        layer.num_v_heads,
        layer.head_k_dim,
        layer.head_v_dim,
        layer.conv_size,
        layer.o_norm.eps,
    )
    ours = {name: x.detach() for name, x in layer.state_dict().items()}
    theirs = form.from_ours(ours, s)
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in theirs.items()}
