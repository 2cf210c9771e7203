"""deltic.integrations.transformers: small random models with and without it.

The measure is transformers' own fallback in torch, which is what its functions wrap: where
flash-linear-attention is installed they would call that, which has nothing for the CPU.
"""

import inspect
import logging
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.16")

from deltic._library import HAS_CUDA_BACKWARD  # noqa: E402
from deltic.integrations import _patch  # noqa: E402
from deltic.integrations import transformers as integration  # noqa: E402
from support import error  # noqa: E402

# Measured: 9e-7 for logits, at most 5e-6 for gradients. Both sides are fp32 with sums in another
# order; 1e-4 is the operators' own budget.
TOLERANCE = 1e-4

TEXT = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GDN = dict(
    TEXT,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
KDA = dict(
    TEXT,
    num_key_value_heads=4,
    linear_num_heads=3,
    linear_head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
)
# Model: its module, configuration, class, and the configuration's values.
SMALL = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(GDN, **MOE)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GDN),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KDA),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {key: value for key, value in GDN.items() if key != "head_dim"},
    ),
}


def module_of(name):
    return import_module(f"transformers.models.{name}.modeling_{name}")


@contextmanager
def fallback(name):
    """The torch functions that the module's functions wrap."""
    module = module_of(name)
    found = {key: vars(module)[key] for key in integration._FUNCTIONS if key in vars(module)}
    assert len(found) == 4
    try:
        for key, function in found.items():
            setattr(module, key, inspect.unwrap(function))
        yield
    finally:
        for key, function in found.items():
            setattr(module, key, function)


def build(name, dtype=torch.float32):
    if not hasattr(transformers, SMALL[name][0]):
        pytest.skip(f"{name} is not in transformers {transformers.__version__}")
    config, model, values = SMALL[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**values))
    with torch.no_grad():  # away from ones and zeros, and with gates under which states last
        for key, parameter in built.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.rand_like(parameter))
            elif "A_log" in key:
                parameter.uniform_(-2, 0)
            elif "dt_bias" in key:
                parameter.uniform_(-3, 0)
            elif parameter.dim() > 1 and "conv" not in key:
                parameter.mul_(2.5)
    return built.to(dtype).eval()


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, TEXT["vocab_size"], (batch, length), generator=generator)


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    integration.disable()


@pytest.fixture(params=list(SMALL))
def pair(request):
    """A name, a model built before enable(), and what the fallback gives for a call."""
    model = build(request.param)

    def both(call):
        with fallback(request.param):
            expected = call(model)
            with integration.enable(request.param) as report:
                assert report.done
                found = call(model)
        return found, expected

    both.name = request.param
    return both


def test_logits(pair):
    def call(model):
        with torch.no_grad():
            return model(tokens(2, 150)).logits

    found, expected = pair(call)
    assert error(found, expected) < TOLERANCE
    assert not torch.equal(found, expected), "the two ran on the same functions"


def test_left_padding(pair):
    ids, mask = tokens(3, 90), torch.ones(3, 90, dtype=torch.long)
    for row, pads in enumerate((0, 17, 70)):
        ids[row, :pads], mask[row, :pads] = 0, 0

    def call(model):
        with torch.no_grad():
            return model(ids, attention_mask=mask).logits[mask.bool()]

    found, expected = pair(call)
    assert error(found, expected) < TOLERANCE


def test_greedy_generation(pair):
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    ids[1, :9], mask[1, :9] = 0, 0

    def call(model):
        return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)

    found, expected = pair(call)
    assert found.shape == (2, 86)
    assert torch.equal(found, expected)


def test_prompt_in_pieces(pair):
    ids = tokens(2, 120)

    def call(model):
        cache, found = None, []
        with torch.no_grad():
            for piece in (ids[:, :2], ids[:, 2:90], ids[:, 90:91], ids[:, 91:]):
                out = model(piece, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits)
        return torch.cat(found, dim=1)

    found, expected = pair(call)
    assert error(found, expected) < TOLERANCE


def loss_and_gradients(model):
    ids = tokens(2, 100).to(model.device)
    model.train()
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    model.eval()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {key: grad.clone() for key, grad in gradients.items()}


def test_gradients(pair):
    (loss, found), (expected_loss, expected) = pair(loss_and_gradients)
    assert error(loss, expected_loss) < TOLERANCE
    assert found.keys() == expected.keys() and len(found) > 40
    for key, gradient in expected.items():
        assert gradient.any(), key
        assert error(found[key], gradient) < TOLERANCE, key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(not HAS_CUDA_BACKWARD, reason="no gradients on a GPU in this build")
@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])  # no router that rounding may change
def test_gradients_on_a_gpu(name, caplog):
    """Beside the fallback there; nothing is handed to it."""
    model = build(name).cuda()
    with fallback(name):
        expected_loss, expected = loss_and_gradients(model)
    _patch._said.clear()
    with integration.enable(name) as report, caplog.at_level(logging.WARNING):
        loss, found = loss_and_gradients(model)
    assert report.done and "handed to the original" not in caplog.text
    assert error(loss.cpu(), expected_loss.cpu()) < TOLERANCE
    assert found.keys() == expected.keys() and len(found) > 40
    for key, gradient in expected.items():
        # Sums in yet another order on both sides: twice the budget of a gate's parameters.
        assert error(found[key].cpu(), gradient.cpu()) < 4e-4, key
    assert any(not torch.equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("convolution", ["seq_idx", "cu_seq_lens_q"])
def test_packed(name, convolution):
    """Packed sequences give what they give alone, which the fallback cannot do."""
    model, ids, lengths = build(name), tokens(1, 120), [50, 1, 69]
    offsets = torch.tensor([0, 50, 51, 120], dtype=torch.int32)
    kwargs = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=69, max_length_k=69)
    if convolution == "seq_idx":
        numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        kwargs["seq_idx"] = numbers[None].to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), integration.enable(name):
        alone = [model(piece, use_cache=False).logits for piece in ids.split(lengths, dim=1)]
        packed = model(ids, position_ids=positions, use_cache=False, **kwargs).logits
    assert error(packed, torch.cat(alone, dim=1)) < TOLERANCE


def two_packed():
    """Rows of 30 and 40 tokens: ids, and how a model is told of them."""
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    positions = torch.cat((torch.arange(30), torch.arange(40)))[None]
    kwargs = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=40, max_length_k=40)
    return tokens(1, 70), dict(position_ids=positions, **kwargs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", list(SMALL))
def test_packed_sequences_make_no_cache(name, training, caplog, monkeypatch):
    """use_cache is True where nobody says otherwise, and softmax attention mixes what has a cache.

    The figures of docs/transformers.md are those of this test.
    """
    model = build(name).train(training)
    ids, kwargs = two_packed()
    _patch._said.clear()
    assert model.config.use_cache
    with integration.enable(name), caplog.at_level(logging.WARNING, "deltic.integrations"):
        alone = [model(piece, use_cache=False).logits for piece in ids.split([30, 40], dim=1)]
        alone = torch.cat(alone, dim=1)
        model(ids, use_cache=False, **kwargs)
        assert not caplog.messages
        for _ in range(2):
            found = model(ids, labels=ids, **kwargs)
            assert found.past_key_values is None
            assert error(found.logits, alone) < TOLERANCE
        # What is kept away: the model's own forward.
        owner = type(model.model)
        monkeypatch.setattr(owner, "forward", owner.forward.__wrapped__)
        leaked = model(ids, **kwargs).logits
        monkeypatch.undo()
        assert 0.34 < ((leaked - alone).norm() / alone.norm()).item() < 0.82
    assert len(caplog.messages) == 1 and "use_cache=False" in caplog.messages[0]


@pytest.mark.parametrize("name", list(SMALL))
def test_packed_sequences_and_a_cache_are_refused(name):
    model = build(name)
    ids, kwargs = two_packed()
    refused = pytest.raises(ValueError, match=r"Model: cu_seq_lens_q: 2 packed.*use_cache=False")
    with integration.enable(name), torch.no_grad():
        past = model(ids[:, :5], use_cache=True).past_key_values
        with refused as caught:
            model(ids, use_cache=True, **kwargs)
        assert str(caught.value).endswith("got use_cache=True")
        with refused as caught:
            model(ids, use_cache=False, past_key_values=past, **kwargs)
        assert str(caught.value).endswith("got past_key_values")
        assert past.get_seq_length() == 5
    model.train().gradient_checkpointing_enable()  # transformers' own word against use_cache
    with integration.enable(name):
        assert model(ids, use_cache=True, **kwargs).past_key_values is None


def test_packed_sequences_in_a_graph_make_no_cache():
    model, (ids, kwargs) = build("qwen3_next").model, two_packed()
    torch._dynamo.reset()
    with integration.enable("qwen3_next"), torch.no_grad():
        expected = model(ids, use_cache=False, **kwargs).last_hidden_state
        found = torch.compile(model, backend="eager")(ids, **kwargs)
    assert found.past_key_values is None
    assert error(found.last_hidden_state, expected) < TOLERANCE


def test_what_softmax_attention_does_not_see_is_said(caplog):
    model, (ids, kwargs) = build("qwen3_5"), two_packed()
    positions = kwargs.pop("position_ids")
    _patch._said.clear()
    with (
        integration.enable("qwen3_5"),
        caplog.at_level(logging.WARNING, "deltic.integrations"),
        torch.no_grad(),
    ):
        model(ids, use_cache=False, **kwargs)
        model(ids, use_cache=False, position_ids=positions.expand(3, 1, 70), **kwargs)
        model(ids, use_cache=False, position_ids=positions, attention_mask=ids != 0, **kwargs)
        model(ids, use_cache=False, position_ids=positions, seq_idx=torch.zeros(1, 70).int())
    without, masked, alone = caplog.messages
    assert without.endswith("got no position_ids of text (docs/transformers.md)")
    assert masked.endswith("got an attention_mask (docs/transformers.md)")
    assert "without cu_seq_lens_q" in alone


@pytest.mark.parametrize("name", list(SMALL))
def test_positions_alone_leak_and_that_is_said(name, caplog):
    """Of position_ids alone the layers learn nothing: 40 to 55 % off, with transformers' own too.

    The figures of docs/transformers.md are those of this test.
    """
    model, ids, lengths = build(name), tokens(1, 120), [50, 1, 69]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, 50, 51, 120], dtype=torch.int32)
    kwargs = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=69, max_length_k=69)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    padded = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as generate() counts them
    _patch._said.clear()

    def run(*args, **kwargs):
        with torch.no_grad():
            return model(*args, use_cache=False, **kwargs).logits

    with integration.enable(name), caplog.at_level(logging.WARNING, "deltic.integrations"):
        alone = torch.cat([run(piece) for piece in ids.split(lengths, dim=1)], dim=1)
        run(ids, position_ids=positions, **kwargs)
        run(ids.view(2, 60), attention_mask=mask, position_ids=padded)
        run(ids, position_ids=torch.arange(120)[None])
        assert not caplog.messages
        found = run(ids, position_ids=positions)
        run(ids, position_ids=positions)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("packed sequences: position")
    with fallback(name):
        same = run(ids, position_ids=positions)
    assert error(found, same) < TOLERANCE
    assert 0.39 < ((found - alone).norm() / alone.norm()).item() < 0.56


def test_a_look_at_positions_is_no_part_of_a_graph(caplog):
    model, ids = build("qwen3_next").model, tokens(1, 40)
    positions = torch.cat((torch.arange(20), torch.arange(20)))[None]
    _patch._said.clear()
    with integration.enable("qwen3_next"), torch.no_grad():
        counts = torch._dynamo.explain(model)(ids, position_ids=positions, use_cache=False)
    reasons = [str(reason) for reason in counts.break_reasons]
    assert not any("integrations" in reason for reason in reasons), reasons
    assert "deltic.integrations" not in {record.name for record in caplog.records}


@pytest.mark.parametrize("name", list(SMALL))
def test_offsets_of_one_sequence_and_a_cache(name):
    """Offsets count the new tokens, and the convolution's row starts with earlier ones."""
    model, ids = build(name), tokens(1, 62)
    offsets = torch.tensor([0, 30], dtype=torch.int32)
    kwargs = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=30, max_length_k=30)
    with torch.no_grad(), integration.enable(name):
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :2], use_cache=True)  # fewer than the taps: padded with zeros
        second = model(ids[:, 2:32], past_key_values=first.past_key_values, **kwargs)
        third = model(ids[:, 32:], past_key_values=second.past_key_values, **kwargs)
    found = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
def test_convolution_with_offsets_and_earlier_inputs(compiled):
    """A row that is longer than its offsets say starts with earlier inputs; nothing is dropped."""
    integration.enable("qwen3_next")
    convolution = module_of("qwen3_next").causal_conv1d_fn
    if compiled:
        torch._dynamo.reset()
        convolution = torch.compile(convolution, backend="eager", fullgraph=True)
    x, weight = torch.randn(1, 8, 34), torch.randn(8, 4)
    expected = torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=8)[..., :34]
    found = convolution(x, weight, cu_seq_lens_q=torch.tensor([0, 30]))
    assert error(found, expected) < 1e-6 and found[..., 30:].any()
    # Several sequences: whose the earlier inputs are nobody knows.
    with pytest.raises((ValueError, RuntimeError), match=r"cu_seq_lens_q: expected offsets .*34"):
        convolution(x, weight, cu_seq_lens_q=torch.tensor([0, 10, 30]))
    apart = convolution(x, weight, cu_seq_lens_q=torch.tensor([0, 10, 34]))
    second = torch.nn.functional.conv1d(x[..., 10:], weight[:, None], padding=3, groups=8)
    assert error(apart[..., 10:], second[..., :24]) < 1e-6
    assert error(apart[..., :10], expected[..., :10]) < 1e-6


@pytest.mark.parametrize("name", list(SMALL))
def test_bfloat16(name):
    """A layer: at most twice as far from the one in fp32 as the fallback. (Not the model: there a
    rounding may choose another expert.)"""
    reference, rounded = build(name), build(name, torch.bfloat16)
    reference.load_state_dict(rounded.state_dict())
    exact, layer = (
        next(m for m in model.modules() if hasattr(m, "conv1d")) for model in (reference, rounded)
    )
    x = torch.randn(2, 130, TEXT["hidden_size"]).bfloat16()
    with torch.no_grad(), fallback(name):
        expected, theirs = exact(x.float()), layer(x)
        with integration.enable(name):
            ours = layer(x)
    assert ours.dtype == torch.bfloat16
    assert error(ours, expected) < 2 * error(theirs, expected)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next", "bailing_hybrid"])
def test_forget_gate(name, bound):
    """The gates of the KDA models, with a lower bound where they have one; values and gradients."""
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    gate = next(v for k, v in vars(module).items() if k.endswith("ForgetGate"))
    config = SimpleNamespace(
        hidden_size=24,
        linear_head_dim=8,
        linear_num_heads=3,
        linear_lower_bound=bound,
        kda_safe_gate=bound is not None,
        kda_lower_bound=bound,
    )
    torch.manual_seed(0)
    layer = gate(config)
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    x = 3 * torch.randn(2, 7, 24, requires_grad=True)
    wanted = [x, *layer.parameters()]
    d_g = torch.randn(2, 7, 3, 8)
    expected = layer(x)
    gradients = torch.autograd.grad(expected, wanted, d_g)
    with integration.enable(name):
        found = layer(x)
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(torch.autograd.grad(found, wanted, d_g), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert layer.bfloat16()(x.bfloat16()).dtype == (
            torch.bfloat16 if name == "bailing_hybrid" else torch.float32
        )


def test_built_before_and_after():
    ids = tokens(1, 80)
    before = build("qwen3_next")
    with torch.no_grad(), fallback("qwen3_next"):
        plain = before(ids).logits
        integration.enable("qwen3_next")
        after = build("qwen3_next")
        first, second = before(ids).logits, after(ids).logits
        integration.disable()
        assert torch.equal(first, second) and not torch.equal(first, plain)
        assert torch.equal(before(ids).logits, plain) and torch.equal(after(ids).logits, plain)


def snapshot():
    found = {}
    for name in integration.MODELS:
        try:
            module = module_of(name)
        except ImportError:
            continue
        found[name] = dict(vars(module))
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[name, value.__name__] = dict(vars(value))
    return found


def test_disable_restores_everything():
    integration.enable()
    integration.disable()
    before = snapshot()
    report = integration.enable()
    assert snapshot() != before
    again = integration.enable()
    assert not again.done and set(again.left.values()) == {"replaced before"}
    back = integration.disable()
    assert snapshot() == before
    assert len(back.done) == len(report.done) and not back.left
    assert not integration.disable().done


def test_context_managers():
    module = module_of("qwen3_next")
    original = module.torch_chunk_gated_delta_rule
    with integration.enable("qwen3_next"):
        ours = module.torch_chunk_gated_delta_rule
        assert ours is not original
        with integration.enable("qwen3_next"):  # inside it changes nothing, nor does its end
            assert module.torch_chunk_gated_delta_rule is ours
        assert module.torch_chunk_gated_delta_rule is ours
        with integration.disable():
            assert module.torch_chunk_gated_delta_rule is original
        assert module.torch_chunk_gated_delta_rule is ours
    assert module.torch_chunk_gated_delta_rule is original


def test_a_later_patch_is_left_alone():
    module = module_of("qwen3_next")
    original = module.causal_conv1d_fn
    try:
        integration.enable("qwen3_next")
        theirs = module.causal_conv1d_fn = lambda *args, **kwargs: None
        report = integration.disable()
        assert module.causal_conv1d_fn is theirs
        assert report.left == {"qwen3_next: causal_conv1d_fn": "something else was put there since"}
    finally:
        module.causal_conv1d_fn = original


def test_what_the_gated_norm_leaves_to_the_original():
    norm = module_of("qwen3_next").Qwen3NextRMSNormGated(8)
    x, gate = torch.randn(3, 5, 8), torch.randn(1, 8)
    expected = norm(x, gate)
    with integration.enable("qwen3_next"):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'gate'"):
            norm(x)
        assert torch.equal(norm(x, gate), expected)
        assert torch.equal(norm(hidden_states=x, gate=gate), expected)
        torch.testing.assert_close(norm(x, gate=gate.expand_as(x)), expected)
        assert norm(x[:0], x[:0]).shape == (0, 5, 8)
        assert norm(x[:, :0], x[:, :0]).shape == (3, 0, 8)


def test_report():
    report = integration.enable("qwen3_next")
    text = str(report)
    assert text.startswith(f"transformers {transformers.__version__}: replaced 6\n")
    assert "torch_chunk_gated_delta_rule -> deltic.fla.ops.gated_delta_rule." in text
    assert "qwen3_next: Qwen3NextRMSNormGated.forward" in text
    assert "qwen3_next: Qwen3NextModel.forward -> the same, without a cache" in text
    assert "not replaced" not in text


def test_other_versions(monkeypatch):
    """A function with other parameters, and a model that is not there, are left and named."""
    module = module_of("qwen3_next")
    monkeypatch.setattr(module, "causal_conv1d_fn", lambda x, weight: x)
    monkeypatch.setattr(integration, "MODELS", (*integration.MODELS, "no_such_model"))
    report = integration.enable(["qwen3_next", "no_such_model"])
    assert "expected the parameters" in report.left["qwen3_next: causal_conv1d_fn"]
    expected = f"no_such_model: not in transformers {transformers.__version__}"
    assert expected in str(report) and len(report.done) == 5


def test_functions_that_are_modules(monkeypatch):
    """With the package `kernels` a function is a module with its signature."""
    module = module_of("qwen3_next")
    function = inspect.unwrap(module.causal_conv1d_fn)

    class Function(torch.nn.Module):
        def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
            return function(hidden_states, weight, bias, activation, **kwargs)

    theirs = Function()
    monkeypatch.setattr(module, "causal_conv1d_fn", theirs)
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    with integration.enable("qwen3_next"):
        assert module.causal_conv1d_fn is not theirs
        torch.testing.assert_close(module.causal_conv1d_fn(x, weight), theirs(x, weight))
        other = module.causal_conv1d_fn(x, weight, activation="gelu")  # handed over
    torch.testing.assert_close(other, theirs(x, weight, activation="gelu"))
    assert module.causal_conv1d_fn is theirs


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="expected names out of qwen3_next.*got 'llama'"):
        integration.enable("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        integration.enable()


def test_handed_to_the_original(caplog):
    """fp64, which no operator takes, and keywords of other surfaces go to what was there."""
    module = module_of("qwen3_next")
    _patch._said.clear()
    rows = [torch.randn(1, 5, 2, 8, dtype=torch.float64) for _ in range(3)]
    gates = dict(g=-torch.rand(1, 5, 2), beta=torch.rand(1, 5, 2))
    with fallback("qwen3_next"):
        expected, _ = module.torch_chunk_gated_delta_rule(*rows, **gates)
        with integration.enable("qwen3_next"), caplog.at_level(logging.WARNING):
            for _ in range(2):
                found, _ = module.torch_chunk_gated_delta_rule(*rows, **gates)
            rows32 = [x.float() for x in rows]
            scaled, _ = module.torch_chunk_gated_delta_rule(*rows32, **gates, scale=3.0)
    assert torch.equal(found, expected)
    assert torch.equal(scaled, expected.float()), "the fallback ignores scale, and so it stays"
    assert [record.getMessage().count("handed to the original") for record in caplog.records] == [
        1,
        1,
    ]


def test_our_errors_stay_ours():
    module = module_of("qwen3_next")
    q = torch.randn(1, 5, 2, 8)
    with integration.enable("qwen3_next"), pytest.raises(ValueError, match="beta"):
        module.torch_chunk_gated_delta_rule(q, q, q, g=torch.zeros(1, 5, 2), beta=torch.rand(1, 5))


def test_import_stays_light():
    code = (
        "import sys, deltic, deltic.integrations\n"
        "assert 'transformers' not in sys.modules and 'fla' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_speed():
    """The chunked functions at a Qwen3-Next layer's widths. At 4096 tokens and 32 heads one thread
    took 5.8 times less; the floor is mild because other programs may run too."""
    module = module_of("qwen3_next")
    q, k, v = (torch.randn(1, 1024, 8, 128) for _ in range(3))
    gates = dict(g=-torch.rand(1, 1024, 8), beta=torch.rand(1, 1024, 8))

    def spent():
        start = time.perf_counter()
        module.torch_chunk_gated_delta_rule(q, k, v, **gates, use_qk_l2norm_in_kernel=True)
        return time.perf_counter() - start

    def both():  # by turns: what else the machine does is beside either
        first = spent()
        with integration.enable("qwen3_next"):
            return first, spent()

    with torch.no_grad(), fallback("qwen3_next"):
        both()
        theirs, ours = (min(times) for times in zip(*(both() for _ in range(4)), strict=True))
    assert theirs > 1.5 * ours, f"fallback {theirs * 1e3:.1f} ms, ours {ours * 1e3:.1f} ms"
