"""deltic.integrations.transformers: to_deltic and from_deltic."""

import inspect
from importlib import import_module

import deltic.layers
import pytest
import torch
from deltic.integrations import _weights
from deltic.integrations.transformers import from_deltic, to_deltic

GDN = dict(
    hidden_size=48,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=3,
    rms_norm_eps=1e-4,
    hidden_act="silu",
)
# As moonshotai/Kimi-Linear-48B-A3B publishes it, with smaller numbers.
KIMI = dict(
    hidden_size=48,
    linear_attn_config=dict(num_heads=3, head_dim=16, short_conv_kernel_size=4),
    rms_norm_eps=1e-5,
    hidden_act="silu",
)
CONFIGS = {"qwen3_next": GDN, "qwen3_5": GDN, "qwen3_5_moe": GDN, "kimi_linear": KIMI}
# The names in published checkpoints, of models whose class the installed version may lack.
NAMES = {
    "qwen3_next": "in_proj_qkvz.weight in_proj_ba.weight conv1d.weight A_log dt_bias norm.weight "
    "out_proj.weight",
    "qwen3_5": "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight "
    "conv1d.weight A_log dt_bias norm.weight out_proj.weight",
    "kimi_linear": "q_proj.weight k_proj.weight v_proj.weight conv1d.weight b_proj.weight "
    "forget_gate.f_a_proj.weight forget_gate.f_b_proj.weight forget_gate.dt_bias "
    "forget_gate.A_log g_a_proj.weight g_b_proj.weight o_norm.weight o_proj.weight",
}
NAMES["qwen3_5_moe"] = NAMES["qwen3_5"]


def weights_of(model, dtype=torch.float32):
    """Random weights under the model's names and of its shapes."""
    form = _weights.FORMATS[model]
    generator = torch.Generator().manual_seed(0)
    shapes = form.shapes(_weights._sizes(CONFIGS[model], form))
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def hugging_face_layer(model, monkeypatch):
    """A layer of transformers' with random weights, and its configuration; or a skip.

    It runs on transformers' functions in torch, not on the Triton ones that they may stand for.
    """
    transformers = pytest.importorskip("transformers", minversion="5.16")
    names = {
        "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
        "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet"),
        "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention"),
    }
    config_name, layer_name = names[model]
    if not hasattr(transformers, config_name):
        pytest.skip(f"{model} is not in transformers {transformers.__version__}")
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    for name, value in list(vars(module).items()):
        if name.endswith(("delta_rule", "delta_attention")) or name.startswith("causal_conv1d"):
            monkeypatch.setattr(module, name, inspect.unwrap(value))
    config = getattr(transformers, config_name)(
        **CONFIGS[model], num_hidden_layers=2, layer_types=["linear_attention"] * 2
    )
    torch.manual_seed(3)
    layer = getattr(module, layer_name)(config, 1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "A_log" in name:
                parameter.uniform_(-2, 0)
            elif "dt_bias" in name:
                parameter.uniform_(-3, 0)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return config, layer.eval()


@pytest.mark.parametrize("model", CONFIGS)
def test_outputs_are_those_of_transformers(model, monkeypatch):
    config, theirs = hugging_face_layer(model, monkeypatch)
    x = torch.randn(2, 70, 48)
    layers = {
        "the layer": to_deltic(theirs),
        "the layer and its configuration": to_deltic(theirs, config),
        "its weights": to_deltic(theirs.state_dict(), config),
        "a dictionary": to_deltic(theirs.state_dict(), CONFIGS[model]),
    }
    with torch.no_grad():
        expected = theirs(x)
        for name, ours in layers.items():
            o, _, _ = ours.eval()(x)
            error = (o - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{name}: {error:.1e}"
    assert layers["the layer"].layer_idx == 1 and layers["its weights"].layer_idx is None
    # Back again, bit by bit, and into a second layer of theirs.
    back = from_deltic(layers["the layer"], model)
    assert back.keys() == theirs.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert back[name].shape == weight.shape and torch.equal(back[name], weight), name
    theirs.load_state_dict(back)


@pytest.mark.parametrize("model", CONFIGS)
def test_gradients_are_those_of_transformers(model, monkeypatch):
    _, theirs = hugging_face_layer(model, monkeypatch)
    ours = to_deltic(theirs)
    x = torch.randn(1, 40, 48)
    (theirs(x) ** 2).mean().backward()
    (ours(x)[0] ** 2).mean().backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in ours.named_parameters()
    }
    form, s = _weights.FORMATS[model], _weights._sizes(theirs, _weights.FORMATS[model])
    for name, gradient in form.from_ours(gradients, s).items():
        expected = theirs.get_parameter(name).grad
        error = (gradient - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", CONFIGS)
def test_there_and_back_without_transformers(model, dtype):
    weights = weights_of(model, dtype)
    assert list(sorted(weights)) == sorted(NAMES[model].split())
    layer = to_deltic(weights, CONFIGS[model])
    assert all(p.dtype == dtype for p in layer.parameters())
    back = from_deltic(layer, model)
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(back[name], weight) and back[name].dtype == dtype
        assert back[name].data_ptr() != weight.data_ptr()
    o, _, _ = layer(torch.randn(1, 9, 48, dtype=dtype))
    assert o.shape == (1, 9, 48) and o.dtype == dtype
    assert layer.A_log._no_weight_decay and layer.A_log.requires_grad


def test_rows_of_qwen3_next_by_hand():
    """Row numbers as weights: per key head its q, k, then the values and gates of its group."""
    config = dict(GDN, linear_num_value_heads=4, linear_key_head_dim=2, linear_value_head_dim=3)
    weights = weights_of("qwen3_next")
    rows = 2 * (2 * 2 + 4 * 3)
    weights["in_proj_qkvz.weight"] = torch.arange(float(rows))[:, None].expand(rows, 48)
    weights["in_proj_ba.weight"] = torch.arange(8.0)[:, None].expand(8, 48)
    weights["conv1d.weight"] = torch.randn(2 * 4 + 12, 1, 3)
    weights |= dict(A_log=torch.zeros(4), dt_bias=torch.zeros(4))
    weights |= {"norm.weight": torch.ones(3), "out_proj.weight": torch.zeros(48, 12)}
    layer = to_deltic(weights, config)
    found = {name: getattr(layer, f"{name}_proj").weight[:, 0].int().tolist() for name in "qkvgba"}
    assert found == {
        "q": [0, 1, 16, 17],
        "k": [2, 3, 18, 19],
        "v": [4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25],
        "g": [10, 11, 12, 13, 14, 15, 26, 27, 28, 29, 30, 31],
        "b": [0, 1, 4, 5],
        "a": [2, 3, 6, 7],
    }


def test_names_of_a_published_kimi_checkpoint():
    weights = weights_of("kimi_linear")
    q, k, v = weights["conv1d.weight"].chunk(3)
    published = {
        name.removeprefix("forget_gate."): x
        for name, x in weights.items()
        if name != "conv1d.weight"
    }
    published |= {"q_conv1d.weight": q, "k_conv1d.weight": k, "v_conv1d.weight": v}
    whole = {f"model.layers.0.self_attn.{name}": x for name, x in published.items()}
    whole["model.embed_tokens.weight"] = torch.zeros(3, 48)
    layer = to_deltic(whole, KIMI, prefix="model.layers.0.self_attn.", layer_idx=0)
    assert layer.layer_idx == 0
    for name, x in from_deltic(layer, "kimi_linear").items():
        assert torch.equal(x, weights[name])
    weights["forget_gate.A_log"] = weights["forget_gate.A_log"].flatten()
    assert torch.equal(to_deltic(weights, KIMI).A_log, layer.A_log)


def test_a_model_with_a_prefix_and_a_composite_configuration():
    weights = {f"a.{name}": x for name, x in weights_of("qwen3_5").items()}
    layer = to_deltic(weights, dict(text_config=GDN), prefix="a.")
    assert layer.head_v_dim == 24 and layer.num_v_heads == 6 and layer.o_norm.eps == 1e-4
    with pytest.raises(ValueError, match="^to_deltic: config: expected the model's"):
        to_deltic(weights, prefix="a.")


def test_a_whole_model(monkeypatch):
    config, theirs = hugging_face_layer("qwen3_next", monkeypatch)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), theirs])
    layer = to_deltic(model, config, prefix="1.", layer_idx=5)
    assert layer.layer_idx == 5 and torch.equal(layer.dt_bias, theirs.dt_bias)


def test_meta_weights():
    weights = {name: x.to("meta") for name, x in weights_of("kimi_linear").items()}
    layer = to_deltic(weights, KIMI)
    assert all(p.device.type == "meta" for p in layer.parameters())
    assert from_deltic(layer, "kimi_linear").keys() == weights.keys()


def test_the_bias_that_kimi_linear_does_not_have():
    layer = to_deltic(weights_of("kimi_linear"), KIMI)
    assert not layer.g_proj[1].bias.requires_grad and not layer.g_proj[1].bias.any()
    with torch.no_grad():
        layer.g_proj[1].bias[0] = 1
    with pytest.raises(ValueError, match=r"^from_deltic: g_proj\.1\.bias: expected zeros"):
        from_deltic(layer, "kimi_linear")


def changed(model, **changes):
    found = weights_of(model)
    for name, value in changes.items():
        found[name.replace("__", ".")] = value
    return {name: x for name, x in found.items() if x is not ...}


BAD = {
    "missing": (
        lambda: (changed("qwen3_next", A_log=..., norm__weight=...), GDN),
        ValueError,
        "^to_deltic: source: expected also A_log, norm.weight, got none of that name$",
    ),
    "extra": (
        lambda: (changed("qwen3_5", conv1d__bias=torch.zeros(3)), GDN),
        ValueError,
        "^to_deltic: source: expected .* alone, got also conv1d.bias$",
    ),
    "shape": (
        lambda: (changed("qwen3_5", in_proj_z__weight=torch.zeros(3, 4)), GDN),
        ValueError,
        r"^to_deltic: in_proj_z.weight: expected shape \[144, 48\], got \[3, 4\]$",
    ),
    "another configuration": (
        lambda: (weights_of("qwen3_next"), dict(GDN, linear_num_value_heads=4)),
        ValueError,
        r"^to_deltic: in_proj_qkvz.weight: expected shape \[256, 48\], got \[352, 48\]$",
    ),
    "integers": (
        lambda: (changed("qwen3_5", A_log=torch.zeros(6, dtype=torch.int8)), GDN),
        TypeError,
        "^to_deltic: A_log: expected a floating-point tensor, got int8$",
    ),
    "no tensor": (
        lambda: (changed("qwen3_5", A_log=3.0), GDN),
        TypeError,
        "^to_deltic: A_log: expected a floating-point tensor, got float$",
    ),
    "None": (lambda: (None, GDN), TypeError, "^to_deltic: source: expected a layer or weights"),
    "empty": (
        lambda: ({}, GDN),
        ValueError,
        "^to_deltic: source: expected a model.s weights .* got no weights at all$",
    ),
    "numbers": (lambda: ({1: torch.zeros(1)}, GDN), TypeError, "^to_deltic: source: expected"),
    "another layer": (
        lambda: (torch.nn.Linear(3, 3), GDN),
        ValueError,
        r"^to_deltic: source: expected the weights of one layer \(with .* or [^,]*\), or .*"
        "got weight, bias$",
    ),
    "no configuration": (
        lambda: (weights_of("qwen3_5"), None),
        ValueError,
        "^to_deltic: config: expected the model's configuration",
    ),
    "an empty configuration": (
        lambda: (weights_of("qwen3_5"), {}),
        ValueError,
        "^to_deltic: config.hidden_size: expected a whole number of at least 1, got none$",
    ),
    "a size of 0": (
        lambda: (weights_of("qwen3_5"), dict(GDN, linear_key_head_dim=0)),
        ValueError,
        "^to_deltic: config.linear_key_head_dim: expected a whole number .*, got 0$",
    ),
    "heads": (
        lambda: (weights_of("qwen3_5"), dict(GDN, linear_num_value_heads=5)),
        ValueError,
        "^to_deltic: config.linear_num_value_heads: expected a multiple of 2 key heads, got 5$",
    ),
    "activation": (
        lambda: (weights_of("qwen3_5"), dict(GDN, hidden_act="gelu")),
        ValueError,
        "^to_deltic: config.hidden_act: expected 'silu', got 'gelu'$",
    ),
    "epsilon": (
        lambda: (weights_of("qwen3_5"), dict(GDN, rms_norm_eps="small")),
        ValueError,
        "^to_deltic: config.rms_norm_eps: expected a finite number of at least 0, got 'small'$",
    ),
    "epsilon below 0": (
        lambda: (weights_of("qwen3_5"), dict(GDN, rms_norm_eps=-1e-6)),
        ValueError,
        "^to_deltic: config.rms_norm_eps: expected a finite number of at least 0, got -1e-06$",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    given, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        to_deltic(*given())


def test_errors_of_a_prefix():
    with pytest.raises(ValueError, match="start with 'x.', got others, such as 'in_proj_qkv"):
        to_deltic(weights_of("qwen3_5"), GDN, prefix="x.")
    with pytest.raises(TypeError, match="^to_deltic: prefix: expected a text, got int$"):
        to_deltic(weights_of("qwen3_5"), GDN, prefix=3)


SMALL = dict(hidden_size=32, head_dim=8, num_heads=2)
BACK = {
    "kind": (deltic.layers.DeltaNet, dict(hidden_size=32, num_heads=2), "qwen3_5", TypeError),
    "model": (deltic.layers.GatedDeltaNet, SMALL, "llama", ValueError),
    "no model": (deltic.layers.GatedDeltaNet, SMALL, None, ValueError),
    "other kind": (deltic.layers.GatedDeltaNet, SMALL, "kimi_linear", ValueError),
    "gate": (deltic.layers.GatedDeltaNet, dict(SMALL, use_gate=False), "qwen3_5", ValueError),
    "bias": (deltic.layers.GatedDeltaNet, dict(SMALL, conv_bias=True), "qwen3_5", ValueError),
    "conv": (
        deltic.layers.GatedDeltaNet,
        dict(SMALL, use_short_conv=False),
        "qwen3_next",
        ValueError,
    ),
    "beta": (
        deltic.layers.GatedDeltaNet,
        dict(SMALL, allow_neg_eigval=True),
        "qwen3_next",
        ValueError,
    ),
    "sigmoid": (
        deltic.layers.GatedDeltaNet,
        dict(SMALL, output_gate_activation="sigmoid"),
        "qwen3_5",
        ValueError,
    ),
    "bounded": (
        deltic.layers.KimiDeltaAttention,
        dict(SMALL, lower_bound=-5.0),
        "kimi_linear",
        ValueError,
    ),
    "grouped": (
        deltic.layers.KimiDeltaAttention,
        dict(SMALL, num_v_heads=4),
        "kimi_linear",
        ValueError,
    ),
    "wide": (deltic.layers.KimiDeltaAttention, dict(SMALL, expand_v=2), "kimi_linear", ValueError),
}


@pytest.mark.parametrize("name", BACK)
def test_errors_of_the_way_back(name):
    layer, options, model, kind = BACK[name]
    with pytest.raises(kind, match=r"^from_deltic: (layer[.\w]*|model): expected "):
        from_deltic(layer(**options), model)
    with pytest.raises(TypeError, match="^from_deltic: layer: expected"):
        from_deltic(None, "qwen3_5")
