"""deltic.integrations.fla: flash-linear-attention's layers and models on the CPU.

There they do not run without it, so the measure is the same model with the operators replaced by
recurrences in plain torch, and references in torch of the modules around them.
"""

import logging
import sys
import warnings
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore", message="Triton is not supported")
pytest.importorskip(
    "fla.ops.kda", reason="flash-linear-attention is not installed", exc_type=Exception
)

from deltic.integrations import _patch  # noqa: E402
from deltic.integrations import fla as integration  # noqa: E402
from support import error  # noqa: E402

TOLERANCE = 1e-4  # fp32 in another order; the operators' own budget

TRITON = "driver|cpu tensor"  # what it says of CPU tensors without and with a GPU in the machine

SIZES = dict(
    hidden_size=48,
    num_hidden_layers=2,
    vocab_size=96,
    num_heads=3,
    intermediate_size=64,
    eos_token_id=None,
    pad_token_id=0,
)
# Model: configuration, class, values, the module of its layer.
SMALL = {
    "kda": ("KDAConfig", "KDAForCausalLM", dict(SIZES, head_dim=16), "kda"),
    "gdn": (
        "GatedDeltaNetConfig",
        "GatedDeltaNetForCausalLM",
        dict(SIZES, head_dim=16, num_v_heads=6, expand_v=1.5),
        "gated_deltanet",
    ),
    "deltanet": ("DeltaNetConfig", "DeltaNetForCausalLM", SIZES, "delta_net"),
}


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    integration.disable()


def build(name):
    models = pytest.importorskip("fla.models", reason="flash-linear-attention has no models here")
    config, model, values, _ = SMALL[name]
    torch.manual_seed(0)
    built = getattr(models, model)(getattr(models, config)(**values)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    return built


def tokens(batch, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)


def recurrence(q, k, v, beta, g=None):
    """The delta rule token by token, q scaled, q and k normalised."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    state = q.new_zeros(*v.shape[:1], v.shape[2], q.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].exp().reshape(*g.shape[:1], g.shape[2], -1, 1)
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)


def plain(q, k, v, beta, g=None, A_log=None, dt_bias=None, **options):
    """The layers' operators on dense batches without states."""
    assert options.get("cu_seqlens") is None and options.get("initial_state") is None
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid()
    if g is not None:
        g = F.softplus(g + dt_bias.view(g.shape[2:]))
        g = -A_log.exp().reshape(-1, *[1] * (g.dim() - 3)) * g
    return recurrence(q, k, v, beta, g), None


@pytest.fixture(params=list(SMALL))
def pair(request, monkeypatch):
    """What a call gives on deltic, and on the plain recurrence."""
    model = build(request.param)
    layer = import_module(f"fla.layers.{SMALL[request.param][3]}")
    functions = [name for name in integration._OPERATORS if name in vars(layer)]
    assert len(functions) == 2

    def both(call):
        with integration.enable():
            found = call(model)
            with monkeypatch.context() as patch:
                for name in functions:
                    patch.setattr(layer, name, plain)
                expected = call(model)
        return found, expected

    return both


def test_logits(pair):
    @torch.no_grad()
    def call(model):
        return model(tokens(2, 90), use_cache=False).logits

    found, expected = pair(call)
    assert error(found, expected) < TOLERANCE
    assert not torch.equal(found, expected), "the two ran on the same functions"


def test_gradients(pair):
    def call(model):
        model.train()
        model.zero_grad()
        loss = model(tokens(2, 80), labels=tokens(2, 80), use_cache=False).loss
        loss.backward()
        model.eval()
        return {key: p.grad.clone() for key, p in model.named_parameters()}

    found, expected = pair(call)
    assert found.keys() == expected.keys() and len(found) > 25
    for key, gradient in expected.items():
        assert gradient.any(), key
        assert error(found[key], gradient) < TOLERANCE, key


@pytest.mark.parametrize("name", list(SMALL))
def test_generation(name):
    """Token for token what the whole sequence gives without a cache, with a padded prompt."""
    model, ids = build(name), tokens(2, 70)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    with integration.enable(), torch.no_grad():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert found.shape == (2, 78)
        for row, pads in ((0, 0), (1, 9)):
            alone = found[row : row + 1, pads:]
            logits = model(alone, use_cache=False).logits
            expected = logits[0, 69 - pads : -1].argmax(-1)
            assert torch.equal(alone[0, 70 - pads :], expected)


@pytest.mark.parametrize("name", list(SMALL))
def test_packed(name):
    model, ids, lengths = build(name), tokens(1, 150), [70, 1, 79]
    offsets = torch.tensor([0, 70, 71, 150])
    with integration.enable(), torch.no_grad():
        alone = [model(piece, use_cache=False).logits for piece in ids.split(lengths, dim=1)]
        packed = model(ids, cu_seqlens=offsets, use_cache=False).logits
    assert error(packed, torch.cat(alone, dim=1)) < TOLERANCE


@pytest.mark.parametrize("bias", [False, True])
def test_convolution(bias):
    """Dense, packed, in pieces and token by token, with gradients, against conv1d."""
    from fla.modules import ShortConvolution

    torch.manual_seed(0)
    conv = ShortConvolution(6, 4, bias=bias, activation="silu")
    x = torch.randn(2, 11, 6, requires_grad=True)

    def reference(x):
        y = F.conv1d(x.transpose(1, 2), conv.weight, conv.bias, padding=3, groups=6)
        return F.silu(y[..., : x.shape[1]]).transpose(1, 2)

    wanted = [x, *conv.parameters()]
    d_y = torch.randn(2, 11, 6)
    with integration.enable():
        y, state = conv(x, output_final_state=True)
        torch.testing.assert_close(y, reference(x))
        assert torch.equal(state, x[:, -4:].transpose(1, 2))
        found = torch.autograd.grad(conv(x)[0], wanted, d_y)
        for ours, theirs in zip(found, torch.autograd.grad(reference(x), wanted, d_y), strict=True):
            torch.testing.assert_close(ours, theirs)
        for pieces in ([3, 8], [1] * 11, [2, 0, 9]):
            cache, parts = None, []
            with torch.no_grad():
                for part in x.split(pieces, dim=1):
                    part, cache = conv(part, cache=cache, output_final_state=True)
                    parts.append(part)
            torch.testing.assert_close(torch.cat(parts, dim=1), y)
            assert torch.equal(cache, state)
        # Packed: 2, 0 and 5 tokens, then padding; states in and out.
        offsets, states = torch.tensor([0, 2, 2, 7]), torch.randn(3, 6, 4)
        packed, last = conv(x[:1], cache=states, output_final_state=True, cu_seqlens=offsets)
        for n, (start, end) in enumerate(((0, 2), (2, 2), (2, 7))):
            rows = torch.cat((states[n : n + 1].transpose(1, 2), x[:1, start:end]), dim=1)
            torch.testing.assert_close(packed[:, start:end], reference(rows)[:, 4:])
            assert torch.equal(last[n : n + 1], rows[:, -4:].transpose(1, 2))
        assert not packed[:, 7:].any()


def test_norms_activations_and_losses():
    from fla import modules
    from fla.modules.activations import swiglu
    from fla.modules.norm.layernorm import rms_norm_ref

    torch.manual_seed(0)
    x, gate, residual = (torch.randn(3, 5, 8, requires_grad=True) for _ in range(3))
    norm, gated = modules.RMSNorm(8), modules.FusedRMSNormGated(8, activation="sigmoid")
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        gated.weight.uniform_(0.5, 2)
    logits, target = torch.randn(10, 7), torch.randint(0, 7, (10,))
    target[3] = -100
    hidden, weight = torch.randn(2, 5, 4), torch.randn(7, 4)
    with integration.enable():
        torch.testing.assert_close(norm(x), rms_norm_ref(x, norm.weight, None, eps=norm.eps))
        y, beside = norm(x, residual, True)
        torch.testing.assert_close(beside, x + residual)
        torch.testing.assert_close(y, norm(x + residual))
        expected = rms_norm_ref(x, gated.weight, None, eps=gated.eps) * gate.sigmoid()
        torch.testing.assert_close(gated(x, gate), expected)
        assert gated(x[:0], gate[:0]).shape == (0, 5, 8)
        assert gated(x[:, :0], gate[:, :0]).shape == (3, 0, 8)
        with torch.no_grad():  # another way to the same
            torch.testing.assert_close(gated(x, gate), expected)
        torch.testing.assert_close(modules.mlp.swiglu(x, gate), F.silu(x) * gate)
        assert modules.mlp.swiglu is not swiglu, "names imported elsewhere before are replaced"
        torch.testing.assert_close(
            modules.FusedCrossEntropyLoss()(logits, target), F.cross_entropy(logits, target)
        )
        torch.testing.assert_close(
            modules.FusedLinearCrossEntropyLoss()(hidden, target, weight),
            F.cross_entropy((hidden @ weight.T).flatten(0, 1), target),
        )


def snapshot():
    return {
        name: dict(vars(module))
        for name, module in sys.modules.items()
        if module is not None and name.partition(".")[0] == "fla"
    }


def test_disable_restores_everything():
    integration.enable()
    integration.disable()
    before = snapshot()
    report = integration.enable()
    assert snapshot() != before
    assert not integration.enable().done
    back = integration.disable()
    assert snapshot() == before
    assert len(back.done) == len(report.done) == 13 and not back.left


def test_names_imported_while_on():
    """A module that is loaded while on gets the originals back too."""
    name = "fla.integration_test_module"
    try:
        with integration.enable():
            module = sys.modules[name] = type(sys)(name)
            exec("from fla.ops.kda import fused_recurrent_kda", vars(module))
            ours = module.fused_recurrent_kda
        assert module.fused_recurrent_kda is not ours
        assert module.fused_recurrent_kda is sys.modules["fla.ops.kda"].fused_recurrent_kda
    finally:
        del sys.modules[name]


def rows(dtype=torch.float32):
    q, k, v = (torch.randn(1, 6, 2, 16, dtype=dtype) for _ in range(3))
    return dict(q=q, k=k, v=v, g=-torch.rand(1, 6, 2, 16), beta=torch.rand(1, 6, 2))


def test_registry():
    """The dispatched operators are asked for in the registry, under names imported before too."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    inputs = rows()
    with integration.enable():
        o, _ = chunk_kda(**inputs, use_qk_l2norm_in_kernel=True)
        expected = recurrence(inputs["q"], inputs["k"], inputs["v"], inputs["beta"], inputs["g"])
        assert error(o, expected) < TOLERANCE
        inputs["g"] = inputs["g"][..., 0]
        o, _ = chunk_gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True)
        expected = recurrence(inputs["q"], inputs["k"], inputs["v"], inputs["beta"], inputs["g"])
        assert error(o, expected) < TOLERANCE
        with integration.disable(), pytest.raises(Exception, match=TRITON):
            chunk_gated_delta_rule(**inputs)
        chunk_gated_delta_rule(**inputs)
    with pytest.raises(Exception, match=TRITON):
        chunk_gated_delta_rule(**inputs)


def test_without_a_registry(monkeypatch):
    """Where dispatch is off, or older than the registry, every operator is replaced by name."""
    monkeypatch.setattr(integration, "_register", lambda: "none here")
    report = integration.enable()
    assert any(entry.startswith("fla.ops.kda.chunk_kda -> ") for entry in report.done)
    o, _ = sys.modules["fla.ops.kda"].chunk_kda(**rows(), use_qk_l2norm_in_kernel=True)
    assert o.shape == (1, 6, 2, 16)


def test_handed_to_the_original(caplog, monkeypatch):
    _patch._said.clear()
    kda = sys.modules["fla.ops.kda"]
    called = []
    monkeypatch.setattr(kda, "fused_recurrent_kda", lambda **kwargs: called.append(kwargs))
    with integration.enable(), caplog.at_level(logging.WARNING):
        kda.fused_recurrent_kda(**rows(torch.float64))
        kda.fused_recurrent_kda(**rows(), misspelt=1)
        kda.fused_recurrent_kda(**rows())
    assert len(called) == 2
    assert "float64" in caplog.text and "misspelt" in caplog.text


@pytest.mark.parametrize("name", [None, "q", "v", "beta", "g", "initial_state", "A_log"])
def test_any_gradient_counts(name, monkeypatch):
    """Whether a device has gradients is asked where any tensor needs one, not q alone."""
    asked = []
    monkeypatch.setattr(integration, "_runs_on", lambda *of: asked.append(of) or False)
    inputs = {key: x.to("meta") for key, x in rows().items()}
    inputs["initial_state"] = torch.zeros(1, 2, 16, 16, device="meta")
    inputs["A_log"] = torch.zeros(2, device="meta")
    if name is not None:
        inputs[name].requires_grad_()
    ours = integration._OPERATORS["chunk_kda"][1]
    assert "no operator for meta tensors" in integration._refusal(ours, (), inputs)
    with torch.no_grad():
        integration._refusal(ours, (inputs.pop("q"),), inputs)
    assert asked == [("meta", name is not None), ("meta", False)]


@pytest.mark.parametrize("name", ["chunk_delta_rule", "fused_recurrent_kda"])
def test_compiled_calls_have_one_operator(name):
    """What is asked before a call is no part of a compiled graph, and nothing is warned of."""
    integration.enable()
    integration._takes.cache_clear()
    place = integration._OPERATORS[name][0]
    function = getattr(sys.modules[f"fla.ops.{place}"], name)
    inputs = {key: x for key, x in rows().items() if place == "kda" or key != "g"}
    if name == "chunk_delta_rule":  # theirs takes 16-bit numbers only
        inputs = {key: x.bfloat16() for key, x in inputs.items()}
    inputs["v"].requires_grad_()
    graphs = []

    def keep(graph, example):
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        )
        return graph

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = torch.compile(function, backend=keep, fullgraph=True)
        o, _ = compiled(**inputs)
    assert error(o, function(**inputs)[0]) < 1e-6
    assert len(graphs) == 1 and sum("deltic" in target for target in graphs[0]) == 1, graphs
    assert not [str(x.message) for x in said if "deltic" in str(x.message) + str(x.filename)]
    assert not [str(x.message) for x in said if "lru_cache" in str(x.message)]


def test_report_and_errors(monkeypatch):
    text = str(integration.enable())
    assert text.startswith("flash-linear-attention 0.")
    assert "chunk_kda and chunk_gated_delta_rule in fla.backends -> the backend 'deltic'" in text
    assert "rms_norm_gated -> torch, for CPU tensors" in text
    integration.disable()
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        integration.enable()
