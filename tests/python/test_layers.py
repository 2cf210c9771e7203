"""deltic.layers against one composition in fp64, against themselves in parts, and the originals."""

import copy
import importlib
import inspect
import pickle

import deltic.layers
import pytest
import torch
import torch.nn.functional as F
from deltic.layers import Cache, DeltaNet, GatedDeltaNet, KimiDeltaAttention, ShortConvolution
from deltic.layers import _short_convolution as short_convolution
from deltic.layers._packing import Packing
from hypothesis import given, settings
from hypothesis import strategies as st
from support import error

LAYERS = {"DeltaNet": DeltaNet, "GatedDeltaNet": GatedDeltaNet, "KDA": KimiDeltaAttention}
# Small layers that between them use every option of the three constructors.
SMALL = {
    "DeltaNet": dict(hidden_size=32, num_heads=2),
    "DeltaNet-gate": dict(
        hidden_size=32, num_heads=2, use_gate=True, conv_bias=True, allow_neg_eigval=True
    ),
    "DeltaNet-sum": dict(
        d_model=24, num_heads=2, expand_v=2, qk_norm="sum", qk_activation="elu", conv_size=3
    ),
    "DeltaNet-one": dict(
        hidden_size=32, expand_k=0.5, num_heads=2, use_beta=False, qk_activation="relu"
    ),
    "DeltaNet-two": dict(
        hidden_size=32,
        num_heads=2,
        use_beta=False,
        allow_neg_eigval=True,
        qk_activation="identity",
        use_short_conv=False,
    ),
    "GatedDeltaNet": dict(hidden_size=32, head_dim=16, num_heads=2),
    "GatedDeltaNet-grouped": dict(
        hidden_size=32,
        head_dim=8,
        num_heads=2,
        num_v_heads=4,
        expand_v=1.5,
        conv_bias=True,
        output_gate_activation="sigmoid",
    ),
    "GatedDeltaNet-bare": dict(
        hidden_size=32,
        head_dim=16,
        num_heads=1,
        use_gate=False,
        use_short_conv=False,
        allow_neg_eigval=True,
    ),
    "GatedDeltaNet-wide": dict(hidden_size=32, head_dim=16, num_heads=1, conv_size=6),
    "KDA": dict(hidden_size=32, head_dim=16, num_heads=2),
    "KDA-grouped": dict(
        hidden_size=32,
        head_dim=8,
        num_heads=2,
        num_v_heads=6,
        expand_v=2,
        conv_bias=True,
        allow_neg_eigval=True,
    ),
    "KDA-bounded": dict(
        hidden_size=32, head_dim=16, num_heads=2, safe_gate=True, lower_bound=-5.0, conv_size=1
    ),
    "KDA-bare": dict(hidden_size=32, head_dim=16, num_heads=1, use_short_conv=False),
}
every_layer = pytest.mark.parametrize("name", SMALL)
# Of each kind one, and every kind of grouped values.
SOME = ("DeltaNet", "DeltaNet-gate", "GatedDeltaNet-grouped", "KDA-grouped", "KDA-bounded")
some_layers = pytest.mark.parametrize("name", SOME)
BUDGET = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more):
    """A small layer with weights large enough to tell one token's past from another's."""
    torch.manual_seed(seed)
    layer = LAYERS[name.split("-")[0]](**SMALL[name], **{"layer_idx": 0, **more})
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith("proj.weight"):
                parameter.mul_(2.0)
            if key.endswith("o_norm.weight") or key.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype).eval()


def rows(layer, batch: int, tokens: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    return torch.randn(batch, tokens, layer.hidden_size, generator=generator).to(dtype)


def composed(layer, p, x):
    """One sequence ``[T, hidden_size]`` in plain operations, from the parameters p.

    The equations are written out again here on purpose: nothing of the package computes anything.
    """
    kind = type(layer).__name__

    def linear(name):
        y = x
        for key in (f"{name}.weight", f"{name}.0.weight", f"{name}.1.weight"):
            y = y @ p[key].t() if key in p else y
        return y + p[f"{name}.1.bias"] if f"{name}.1.bias" in p else y

    def convolved(name, is_silu):
        y = linear(f"{name}_proj")
        if layer.use_short_conv:
            weight = p[f"{name}_conv1d.weight"][:, 0]
            width = weight.shape[1]
            padded = torch.cat([y.new_zeros(width - 1, y.shape[1]), y])
            y = sum(padded[i : i + y.shape[0]] * weight[:, i] for i in range(width))
            y = y + p.get(f"{name}_conv1d.bias", 0.0)
        return y * torch.sigmoid(y) if is_silu else y

    activation = getattr(layer, "qk_activation", "silu")
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    q, k = (convolved(n, activation == "silu").view(-1, H, K) for n in "qk")
    v = convolved("v", True).view(-1, HV, V)
    if activation == "relu":
        q, k = q.clamp(min=0), k.clamp(min=0)
    if activation == "elu":
        q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    if getattr(layer, "qk_norm", "l2") == "sum":
        q, k = (y / y.abs().sum(-1, keepdim=True).clamp(min=1e-6) for y in (q, k))
    else:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, dim=1) for y in (q, k))

    beta = torch.sigmoid(linear("b_proj")) if "b_proj.weight" in p else torch.ones_like(v[..., 0])
    beta = beta * 2 if layer.allow_neg_eigval else beta
    decay = torch.ones_like(k)
    if kind == "GatedDeltaNet":
        g = -p["A_log"].exp() * torch.log1p((linear("a_proj") + p["dt_bias"]).exp())
        decay = g.exp()[..., None].expand_as(k)
    if kind == "KimiDeltaAttention":
        f = (linear("f_proj") + p["dt_bias"]).view(-1, HV, K)
        rate = p["A_log"].exp()[:, None]
        if layer.lower_bound is None:
            decay = torch.exp(-rate * torch.log1p(f.exp()))
        else:
            decay = torch.exp(layer.lower_bound * torch.sigmoid(rate * f))

    S, found = x.new_zeros(HV, K, V), []
    for t in range(x.shape[0]):
        S = decay[t][..., None] * S
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * u[:, None]
        found.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
    o = torch.stack(found) if found else v[:0]
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * p["o_norm.weight"]
    if "g_proj.weight" in p or "g_proj.0.weight" in p:
        gate = linear("g_proj").view(-1, HV, V)
        is_sigmoid = layer.o_norm.activation == "sigmoid"
        o = o * (torch.sigmoid(gate) if is_sigmoid else gate * torch.sigmoid(gate))
    return o.flatten(1) @ p["o_proj.weight"].t()


def doubles(layer):
    return {key: p.detach().double().requires_grad_() for key, p in layer.named_parameters()}


def expected(layer, x):
    """The composition for every sequence of a batch."""
    with torch.no_grad():
        p = doubles(layer)
        return torch.stack([composed(layer, p, row.double()) for row in x])


def check(found, reference, dtype=torch.float32):
    assert found.shape == reference.shape
    assert error(found, reference) <= BUDGET[dtype]


# Values


@every_layer
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_forward(name, mode):
    layer = build(name, mode=mode)
    x = rows(layer, 2, 70)
    reference = expected(layer, x)
    for tokens in (70, 5, 1):
        with torch.no_grad():
            o, weights, cache = layer(x[:, :tokens])
        assert weights is None and cache is None
        check(o, reference[:, :tokens])


def compare_gradients(layer, x, sequences, call, budget):
    """Output and gradients of call against the composition of the given sequences."""
    p, wide = doubles(layer), x.detach().double().requires_grad_()
    reference = torch.cat([composed(layer, p, wide[index]) for index in sequences])
    d_o = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1)).double()
    (reference * d_o).sum().backward()
    leaf = x.clone().requires_grad_()
    o = torch.cat([call(leaf)[index] for index in sequences])
    layer.zero_grad()
    (o * d_o.to(o.dtype)).sum().backward()
    assert error(o, reference) <= budget
    assert error(leaf.grad, wide.grad) <= 3 * budget
    for key, parameter in layer.named_parameters():
        found = error(parameter.grad, p[key].grad)
        assert found <= 3 * budget, f"{key}: error {found:.1e}"


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_gradients(name, training):
    layer = build(name).train(training)
    x = rows(layer, 2, 19)
    compare_gradients(layer, x, [0, 1], lambda x: layer(x)[0], 1e-4)


@every_layer
def test_gradients_in_fp64(name, monkeypatch):
    monkeypatch.setenv("DELTIC_IMPL", "reference")
    layer = build(name, torch.float64)
    # The operator's scale is an fp32 number, and the norm takes most of it out again.
    compare_gradients(layer, rows(layer, 2, 9).double(), [0, 1], lambda x: layer(x)[0], 1e-8)


@some_layers
@pytest.mark.parametrize("taps", [8, 0], ids=["operator", "plain"])
def test_gradients_of_packed_and_padded(name, taps, monkeypatch):
    monkeypatch.setattr(short_convolution, "_MOST_TAPS", taps)
    layer = build(name)
    x, cu_seqlens = rows(layer, 1, 20), torch.tensor([0, 1, 1, 9, 11, 20])
    spans = [(0, slice(a, b)) for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
    compare_gradients(layer, x, spans, lambda x: layer(x, cu_seqlens=cu_seqlens)[0], 1e-4)
    x, mask = rows(layer, 3, 9), torch.ones(3, 9)
    mask[0, :4] = mask[1, 7:] = 0
    spans = [(0, slice(4, 9)), (1, slice(0, 7)), (2, slice(0, 9))]
    compare_gradients(layer, x, spans, lambda x: layer(x, attention_mask=mask)[0], 1e-4)


@some_layers
@pytest.mark.parametrize("taps", [8, 0], ids=["operator", "plain"])
def test_gradients_through_a_cache(name, taps, monkeypatch):
    monkeypatch.setattr(short_convolution, "_MOST_TAPS", taps)
    layer = build(name)

    def in_parts(x):
        cache, found = Cache(), []
        for part in x.split([7, 1, 2, 9], dim=1):
            o, _, cache = layer(part, past_key_values=cache, use_cache=True)
            found.append(o)
        return torch.cat(found, dim=1)

    compare_gradients(layer, rows(layer, 2, 19), [0, 1], in_parts, 1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_default_arguments(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    x = torch.randn(1, 66, layer.hidden_size, requires_grad=True)
    o, _, _ = layer(x)
    o.square().sum().backward()
    with torch.no_grad():
        p = {key: parameter.double() for key, parameter in layer.named_parameters()}
        check(o, composed(layer, p, x[0].double())[None])
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any()


# Parts of a sequence


def in_parts(layer, x, sizes, **said):
    """The output of several calls with a cache, and the cache."""
    cache, found, start = Cache(), [], 0
    mask = said.pop("attention_mask", None)
    for part in x.split(sizes, dim=1):
        start += part.shape[1]
        masked = {} if mask is None else {"attention_mask": mask[:, :start]}
        o, _, cache = layer(part, past_key_values=cache, use_cache=True, **masked, **said)
        assert cache.get_seq_length() == start
        found.append(o)
    return torch.cat(found, dim=1), cache


@some_layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_token_by_token(name, dtype, mode):
    layer = build(name, dtype, mode=mode)
    x = rows(layer, 2, 68, dtype)
    reference = expected(layer, x)
    for prefill in (1, 2, 3, 7, 8, 9, 16, 33, 63, 64, 65):
        with torch.inference_mode():
            o, _ = in_parts(layer, x[:, : prefill + 3], [prefill, 1, 1, 1])
        check(o, reference[:, : prefill + 3], dtype)


@some_layers
def test_every_length(name):
    layer = build(name)
    x = rows(layer, 2, 64)
    reference = expected(layer, x)
    with torch.no_grad():
        for tokens in range(1, 65):
            check(layer(x[:, :tokens])[0], reference[:, :tokens])
        check(in_parts(layer, x, [1] * 64)[0], reference)
        check(in_parts(layer, x, [5, 20, 1, 2, 3, 9, 24])[0], reference)


@every_layer
def test_cache_of_every_option(name):
    layer = build(name)
    x = rows(layer, 2, 24)
    with torch.inference_mode():
        check(in_parts(layer, x, [9, 1, 1, 2, 11])[0], expected(layer, x))


def padded(name, side, dtype, tokens=24):
    layer = build(name, dtype)
    lengths = [tokens, 5, 1, tokens - 3, 0]
    x = rows(layer, len(lengths), tokens, dtype)
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    spans = []
    for n, length in enumerate(lengths):
        start = tokens - length if side == "left" else 0
        mask[n, start : start + length] = 1
        spans.append(slice(start, start + length))
    return layer, x, mask, spans


@some_layers
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding(name, side, dtype):
    layer, x, mask, spans = padded(name, side, dtype)
    more = rows(layer, x.shape[0], 4, dtype)
    with torch.inference_mode():
        alone = layer(x, attention_mask=mask)[0]
        o, cache = in_parts(layer, x, [x.shape[1]], attention_mask=mask)
        assert torch.equal(o, alone)
        assert not o[mask == 0].any()
        ones = torch.ones(x.shape[0], 4, dtype=torch.long)
        steps = []
        for t in range(4):  # the mask grows with the sequence, as generation has it
            grown = torch.cat([mask, ones[:, : t + 1]], dim=1)
            step, _, cache = layer(
                more[:, t : t + 1], attention_mask=grown, past_key_values=cache, use_cache=True
            )
            steps.append(step)
    for n, span in enumerate(spans):
        reference = expected(layer, torch.cat([x[n, span], more[n]])[None])
        check(torch.cat([o[n, span], *[step[n] for step in steps]])[None], reference, dtype)


@some_layers
def test_padding_in_parts(name):
    layer, x, mask, spans = padded(name, "left", torch.float32)
    with torch.no_grad():
        o, _ = in_parts(layer, x, [11, 1, 2, 10], attention_mask=mask)
    for n, span in enumerate(spans):
        check(o[n : n + 1, span], expected(layer, x[n : n + 1, span]))
    assert not o[mask == 0].any()


def test_mask_without_padding():
    layer = build("KDA-grouped")
    x = rows(layer, 2, 12)
    with torch.no_grad():
        plain = layer(x)[0]
        for mask in (torch.ones(2, 12), torch.ones(2, 12, dtype=torch.bool), torch.ones(2, 20)):
            assert torch.equal(layer(x, attention_mask=mask)[0], plain)


@some_layers
@pytest.mark.parametrize("taps", [8, 0], ids=["operator", "plain"])
def test_packed(name, taps, monkeypatch):
    monkeypatch.setattr(short_convolution, "_MOST_TAPS", taps)
    layer = build(name)
    cu_seqlens = torch.tensor([0, 30, 30, 31, 33, 50], dtype=torch.int32)
    x = rows(layer, 1, 50)
    with torch.inference_mode():
        o, _, cache = layer(x, cu_seqlens=cu_seqlens, use_cache=True)
        more = rows(layer, 1, 9)
        again = torch.tensor([0, 1, 4, 4, 6, 9])
        o2, _, cache = layer(more, cu_seqlens=again, past_key_values=cache, use_cache=True)
    for n in range(5):
        first, second = slice(*cu_seqlens[n : n + 2]), slice(*again[n : n + 2])
        reference = expected(layer, torch.cat([x[:, first], more[:, second]], dim=1))
        check(torch.cat([o[:, first], o2[:, second]], dim=1), reference)
    assert cache[0]["recurrent_state"].shape[0] == 5


def test_packed_rows_past_the_end():
    layer = build("GatedDeltaNet-grouped")
    x = rows(layer, 1, 12)
    with torch.no_grad():
        o, _, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 9]))
        separate = layer(x[:, 4:9])[0]
    assert not o[:, 9:].any()
    check(o[:, 4:9], separate)


def test_offsets_win_over_a_mask():
    layer = build("DeltaNet")
    x, cu_seqlens = rows(layer, 1, 12), torch.tensor([0, 5, 12])
    with torch.no_grad():
        plain = layer(x, cu_seqlens=cu_seqlens)[0]
        masked = layer(x, attention_mask=torch.zeros(1, 12), cu_seqlens=cu_seqlens)[0]
    assert torch.equal(plain, masked)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_calls(data):
    """Any options, lengths and cuts: every sequence as if it were alone and whole."""
    draw = data.draw
    name = draw(st.sampled_from(sorted(SMALL)))
    mode = draw(st.sampled_from(["chunk", "fused_recurrent"]))
    layer = build(name, mode=mode, seed=draw(st.integers(0, 99)))
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 9, 20]), min_size=1, max_size=4))
    tokens, batch = sum(sizes), draw(st.integers(1, 3))
    mask = torch.ones(batch, tokens)
    for n in range(batch):
        side, missing = draw(st.booleans()), draw(st.integers(0, tokens))
        mask[n, : missing if side else 0] = 0
        mask[n, tokens if side else tokens - missing :] = 0
    x = rows(layer, batch, tokens)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(short_convolution, "_MOST_TAPS", draw(st.sampled_from([8, 0])))
        o, _ = in_parts(layer, x, sizes, attention_mask=mask)
    assert not o[mask == 0].any()
    for n in range(batch):
        is_token = mask[n] != 0
        check(o[n : n + 1, is_token], expected(layer, x[n : n + 1, is_token]))


# The cache


@some_layers
def test_beams(name):
    layer = build(name)
    x, more = rows(layer, 3, 10), rows(layer, 4, 2)
    beams = torch.tensor([2, 0, 0, 1])
    for reorder in ("reorder", "reorder_cache", "batch_select_indices"):
        with torch.inference_mode():
            _, cache = in_parts(layer, x, [10])
            getattr(cache, reorder)(beams)
            found = [
                layer(more[:, t : t + 1], past_key_values=cache, use_cache=True)[0]
                for t in range(2)
            ]
        reference = expected(layer, torch.cat([x[beams], more], dim=1))
        check(torch.cat(found, dim=1), reference[:, 10:])


def test_repeated_and_cloned():
    layer = build("KDA-grouped")
    x, more = rows(layer, 2, 10), rows(layer, 4, 1)
    with torch.no_grad():
        _, cache = in_parts(layer, x, [10])
        kept = cache.clone()
        deep = copy.deepcopy(cache)
        before = cache[0]["recurrent_state"].clone()
        cache.batch_repeat_interleave(2)
        o, _, _ = layer(more, past_key_values=cache, use_cache=True)
        for other in (kept, deep):
            assert torch.equal(other[0]["recurrent_state"], before)
            assert other.get_seq_length() == 10
            again, _, _ = layer(more[::2], past_key_values=other, use_cache=True)
            check(again, o[::2])
    check(o, expected(layer, torch.cat([x.repeat_interleave(2, 0), more], dim=1))[:, 10:])


def test_cache_is_read_only_without_use_cache():
    layer = build("GatedDeltaNet-grouped")
    x, more = rows(layer, 2, 10), rows(layer, 2, 1)
    with torch.no_grad():
        _, cache = in_parts(layer, x, [10])
        kept = cache.clone()
        first = layer(more, past_key_values=cache)[0]
        assert torch.equal(first, layer(more, past_key_values=cache)[0])
    assert cache.get_seq_length() == 10
    assert torch.equal(cache[0]["recurrent_state"], kept[0]["recurrent_state"])
    assert all(map(torch.equal, cache[0]["conv_state"], kept[0]["conv_state"]))


def test_steps_update_the_state_in_place():
    layer = build("GatedDeltaNet-grouped")
    x = rows(layer, 2, 4)
    with torch.no_grad():
        _, cache = in_parts(layer, x, [4])
        memory = cache[0]["recurrent_state"].data_ptr()
        for tokens in (1, 4, 30):
            layer(rows(layer, 2, tokens), past_key_values=cache, use_cache=True)
            assert cache[0]["recurrent_state"].data_ptr() == memory
    conv = cache[0]["conv_state"]
    assert [state.shape for state in conv] == [(2, 16, 3), (2, 16, 3), (2, 48, 3)]


def test_cache_from_inference_mode_and_from_gradients():
    layer = build("KDA-grouped")
    x = rows(layer, 2, 12)
    with torch.inference_mode():
        o1, _, cache = layer(x[:, :5], use_cache=True)
    with torch.no_grad():
        o2, _, cache = layer(x[:, 5:6], past_key_values=cache, use_cache=True)
    o3, _, cache = layer(x[:, 6:9], past_key_values=cache, use_cache=True)
    assert cache[0]["recurrent_state"].requires_grad
    kept = cache[0]["recurrent_state"]
    with torch.no_grad():
        o4, _, cache = layer(x[:, 9:10], past_key_values=cache, use_cache=True)
    o3.sum().backward()  # the step after has not touched what this needs
    assert cache[0]["recurrent_state"] is not kept
    cache.detach_()
    o5, _, cache = layer(x[:, 10:], past_key_values=cache, use_cache=True)
    check(torch.cat([o1, o2, o3, o4, o5], dim=1), expected(layer, x))


def test_two_layers_share_a_cache():
    layers = [build("DeltaNet", layer_idx=0), build("GatedDeltaNet", layer_idx=1)]
    x = rows(layers[0], 2, 12)
    cache, found = None, []
    with torch.no_grad():
        for part in x.split([8, 1, 3], dim=1):
            for layer in layers:
                part, _, cache = layer(part, past_key_values=cache, use_cache=True)
            found.append(part)
        assert len(cache) == 2 and [entry is None for entry in cache] == [False, False]
        assert cache.get_seq_length(1) == 12 and cache.get_seq_length(2) == 0
        assert repr(cache) == "Cache(layers=2, tokens=12)"
        check(torch.cat(found, dim=1), layers[1](layers[0](x)[0])[0])
        cache.reset()
        assert len(cache) == 0 and cache.get_seq_length() == 0


# torch


def test_autocast():
    for name in SOME:
        layer = build(name)
        x = rows(layer, 2, 40).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, _, _ = layer(x)
        assert o.dtype == torch.bfloat16
        check(o, expected(layer, x), torch.bfloat16)
        o.float().sum().backward()
        assert x.grad.dtype == torch.float32
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("DeltaNet", "dense"), ("GatedDeltaNet-grouped", "mask"), ("KDA-grouped", "packed")],
)
def test_compile(name, kind):
    layer = build(name)
    x, mask = rows(layer, 2, 9), torch.ones(2, 9)
    mask[0, :4] = 0
    x, said = {
        "dense": (x, {}),
        "mask": (x, {"attention_mask": mask}),
        "packed": (x[:1], {"cu_seqlens": torch.tensor([0, 4, 9])}),
    }[kind]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    o, reference = compiled(x, **said)[0], layer(x, **said)[0]
    check(o, reference)
    o.sum().backward()
    found = {key: p.grad.clone() for key, p in layer.named_parameters()}
    layer.zero_grad()
    reference.sum().backward()
    for key, p in layer.named_parameters():
        assert error(found[key], p.grad) <= 1e-4, key


def test_compiled_steps():
    layer = build("GatedDeltaNet-grouped")
    x = rows(layer, 2, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x, cache):
        return layer(x, past_key_values=cache, use_cache=True)[0]

    with torch.no_grad():
        o, cache = in_parts(layer, x[:, :5], [5])
        o = torch.cat([o, *(step(x[:, t : t + 1], cache) for t in range(5, 8))], dim=1)
    check(o, expected(layer, x))


def test_deep_copy_and_pickle(tmp_path):
    layer = build("KDA-bounded")
    x = rows(layer, 1, 5)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    with torch.no_grad():
        for other in (copy.deepcopy(layer), loaded):
            assert torch.equal(other(x)[0], layer(x)[0])
    assert "Convolution(32, 1, bias=False, activation='silu')" in repr(layer)


# The convolution by itself


def convolved(x, weight, bias, states, spans):
    """Each span of rows behind its state, in fp64; and the states after."""
    outputs, after = [], []
    for state, span in zip(states, spans, strict=True):
        row = torch.cat([state.t(), x[span]])
        width, tokens = weight.shape[1], row.shape[0] - weight.shape[1] + 1
        taps = [row[i : i + tokens] * weight[:, i] for i in range(width)]
        outputs.append(F.silu(sum(taps) + bias))
        after.append(row[tokens:].t())
    return torch.cat(outputs), torch.stack(after)


@pytest.mark.parametrize("taps", [8, 0], ids=["operator", "plain"])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("lengths", [[11, 11], [1, 1, 1], [2, 0, 1, 17, 3]], ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_convolution(taps, has_state, lengths, width, monkeypatch):
    monkeypatch.setattr(short_convolution, "_MOST_TAPS", taps)
    torch.manual_seed(0)
    layer = ShortConvolution(24, width, bias=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    spans = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    is_dense = len(set(lengths)) == 1
    x = torch.randn(1, sum(lengths), 24)
    if is_dense:
        x = x.view(len(lengths), lengths[0], 24)
    packing = None if is_dense else Packing(1, sum(lengths), offsets)
    states = torch.randn(len(lengths), 24, width - 1) if has_state else None
    leaves = [t for t in (x, layer.weight, layer.bias, states) if t is not None]
    leaves = [t.requires_grad_() for t in leaves]
    y, after = layer(x, states, True, packing)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    zeros = torch.zeros(len(lengths), 24, width - 1).double()
    old = wide[3] if has_state else zeros
    expected_y, expected_after = convolved(
        wide[0].flatten(0, 1), wide[1][:, 0], wide[2], old, spans
    )
    check(y.flatten(0, 1), expected_y)
    check(after, expected_after)
    d_y, d_after = torch.randn_like(y), torch.randn_like(after)
    found = torch.autograd.grad((y, after), leaves, (d_y, d_after))
    reference = torch.autograd.grad(
        (expected_y, expected_after), wide, (d_y.flatten(0, 1).double(), d_after.double())
    )
    for x, y in zip(found, reference, strict=True):
        check(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_convolution_of_many_rows(dtype):
    torch.manual_seed(0)
    layer = ShortConvolution(160, 4).to(dtype)
    x = torch.randn(2, 500, 160).to(dtype).requires_grad_()
    y, _ = layer(x)
    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().double()
    weight.requires_grad_()
    zeros = torch.zeros(2, 160, 3).double()
    reference, _ = convolved(
        wide.flatten(0, 1), weight[:, 0], 0.0, zeros, [slice(0, 500), slice(500, 1000)]
    )
    budget = 1e-5 if dtype == torch.float32 else 6e-3
    assert y.dtype == dtype and error(y.flatten(0, 1), reference) <= budget
    d_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, layer.weight), d_y)
    expected_ = torch.autograd.grad(reference, (wide, weight), d_y.double().flatten(0, 1))
    for a, b in zip(found, expected_, strict=True):
        assert a.dtype == dtype and error(a, b) <= budget


def test_second_gradients_are_refused():
    x = torch.randn(1, 2000, 160, requires_grad=True)
    loss = ShortConvolution(160, 4)(x)[0].square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice|double backward|second"):
        dx.sum().backward()


# Names, and what is refused

SHAPES = {
    "DeltaNet": {
        "q_proj.weight": (1024, 1024),
        "k_proj.weight": (1024, 1024),
        "v_proj.weight": (1024, 1024),
        "b_proj.weight": (4, 1024),
        "q_conv1d.weight": (1024, 1, 4),
        "k_conv1d.weight": (1024, 1, 4),
        "v_conv1d.weight": (1024, 1, 4),
        "o_norm.weight": (256,),
        "o_proj.weight": (1024, 1024),
    },
    "GatedDeltaNet": {
        "A_log": (6,),
        "dt_bias": (6,),
        "q_proj.weight": (1536, 2048),
        "k_proj.weight": (1536, 2048),
        "v_proj.weight": (3072, 2048),
        "a_proj.weight": (6, 2048),
        "b_proj.weight": (6, 2048),
        "q_conv1d.weight": (1536, 1, 4),
        "k_conv1d.weight": (1536, 1, 4),
        "v_conv1d.weight": (3072, 1, 4),
        "g_proj.weight": (3072, 2048),
        "o_norm.weight": (512,),
        "o_proj.weight": (2048, 3072),
    },
    "KDA": {
        "A_log": (16,),
        "dt_bias": (2048,),
        "q_proj.weight": (2048, 2048),
        "k_proj.weight": (2048, 2048),
        "v_proj.weight": (2048, 2048),
        "q_conv1d.weight": (2048, 1, 4),
        "k_conv1d.weight": (2048, 1, 4),
        "v_conv1d.weight": (2048, 1, 4),
        "f_proj.0.weight": (128, 2048),
        "f_proj.1.weight": (2048, 128),
        "b_proj.weight": (16, 2048),
        "g_proj.0.weight": (128, 2048),
        "g_proj.1.weight": (2048, 128),
        "g_proj.1.bias": (2048,),
        "o_norm.weight": (128,),
        "o_proj.weight": (2048, 2048),
    },
}
# Of the small layers that have other names: what is there more (+) and less (-) than by default.
NAMES = {
    "DeltaNet-gate": "+g_proj.weight +q_conv1d.bias +k_conv1d.bias +v_conv1d.bias",
    "DeltaNet-one": "-b_proj.weight",
    "DeltaNet-two": "-b_proj.weight -q_conv1d.weight -k_conv1d.weight -v_conv1d.weight",
    "GatedDeltaNet-grouped": "+q_conv1d.bias +k_conv1d.bias +v_conv1d.bias",
    "GatedDeltaNet-bare": "-g_proj.weight -q_conv1d.weight -k_conv1d.weight -v_conv1d.weight",
    "KDA-grouped": "+q_conv1d.bias +k_conv1d.bias +v_conv1d.bias",
    "KDA-bare": "-q_conv1d.weight -k_conv1d.weight -v_conv1d.weight",
}


def described(layer):
    return {key: (tuple(t.shape), t.dtype) for key, t in layer.state_dict().items()}


@pytest.mark.parametrize("kind", LAYERS)
def test_names_and_shapes(kind):
    found = described(LAYERS[kind]())
    assert {key: shape for key, (shape, _) in found.items()} == SHAPES[kind]
    assert list(found) == list(SHAPES[kind])  # the order an optimiser's state goes by


@every_layer
def test_names_of_options(name):
    names = set(SHAPES[name.split("-")[0]])
    for word in NAMES.get(name, "").split():
        names = names | {word[1:]} if word[0] == "+" else names - {word[1:]}
    assert set(build(name).state_dict()) == names


def test_grouped_shapes():
    found = described(build("KDA-grouped"))
    assert found["A_log"][0] == (6,) and found["dt_bias"][0] == (48,)
    assert found["f_proj.1.weight"][0] == (48, 16) and found["v_conv1d.weight"][0] == (96, 1, 4)


def original(kind):
    module = pytest.importorskip("fla.layers", exc_type=Exception)
    return getattr(module, LAYERS[kind].__name__)


@pytest.mark.parametrize("name", [*LAYERS, *SMALL])
@pytest.mark.filterwarnings("ignore")
def test_state_dict_of_the_original(name):
    """Names, shapes, dtypes and their order; both load the other's."""
    said = SMALL.get(name, {}) if "-" in name else {}
    kind = name.split("-")[0]
    theirs, ours = original(kind)(**said), LAYERS[kind](**said)
    assert described(ours) == described(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", LAYERS)
def test_arguments_of_the_original(kind):
    ours = inspect.signature(LAYERS[kind]).parameters
    theirs = inspect.signature(original(kind)).parameters
    for argument, parameter in theirs.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert ours[argument].default == parameter.default, argument
    assert [n for n in ours if n in theirs] == [n for n in theirs if n in ours]


def test_cache_of_the_original():
    """A cache made for the originals serves these layers."""
    theirs = pytest.importorskip("fla.models.cache_utils", exc_type=Exception).Cache()
    layer = build("GatedDeltaNet-grouped")
    x = rows(layer, 2, 8)
    found, beams = [], torch.tensor([1, 0])
    with torch.inference_mode():
        for part in x.split([6, 1, 1], dim=1):
            o, _, theirs = layer(part, past_key_values=theirs, use_cache=True)
            found.append(o)
        assert theirs.get_seq_length() == 8
        check(torch.cat(found, dim=1), expected(layer, x))
        theirs.reorder_cache(beams)
        o, _, _ = layer(x[:, :1], past_key_values=theirs, use_cache=True)
    check(o, expected(layer, torch.cat([x[beams], x[:, :1]], dim=1))[:, 8:])


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KDA"])
def test_initial_gates(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](hidden_size=64, head_dim=16, num_heads=64)
    step = F.softplus(layer.dt_bias)
    assert 0.9e-3 < step.min() and step.max() < 1.1e-1
    assert layer.A_log.exp().max() <= 16.001 and layer.A_log.isfinite().all()
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
    if kind == "KDA":
        safe = KimiDeltaAttention(64, head_dim=16, num_heads=2, safe_gate=True, lower_bound=-5)
        assert not safe.A_log.any() and layer.A_log.min() >= 0


@pytest.mark.parametrize("kind", LAYERS)
def test_reset_parameters(kind):
    """Built on the meta device and started by the usual loop: as if built at once."""
    small = dict(hidden_size=64, num_heads=2)
    small |= {} if kind == "DeltaNet" else {"head_dim": 16}
    with torch.device("meta"):
        layer = LAYERS[kind](**small)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer(torch.randn(1, 20, 64))[0].isfinite().all()
    if kind != "DeltaNet":
        step = F.softplus(layer.dt_bias)
        assert 0.9e-3 < step.min() and step.max() < 1.1e-1
        assert layer.A_log.exp().max() <= 16.001
        # Only the layer's own: its projections start themselves.
        before = layer.q_proj.weight.clone()
        layer.reset_parameters()
        assert torch.equal(layer.q_proj.weight, before)


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KDA"])
def test_no_weight_decay_stays(kind):
    layer = LAYERS[kind](hidden_size=64, head_dim=16, num_heads=2)
    with torch.device("meta"):
        empty = LAYERS[kind](hidden_size=64, head_dim=16, num_heads=2)
    fresh = LAYERS[kind](hidden_size=64, head_dim=16, num_heads=2)
    fresh.load_state_dict(layer.state_dict(), assign=True)
    for found in (
        layer,
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        empty.to_empty(device="cpu"),
        copy.deepcopy(layer).double(),
        fresh,
        copy.deepcopy(torch.nn.Sequential(layer))[0],
    ):
        assert found.A_log._no_weight_decay and found.dt_bias._no_weight_decay
        assert not hasattr(found.q_proj.weight, "_no_weight_decay")


@pytest.mark.parametrize("layer_idx", [0, 4])
@pytest.mark.parametrize("thing", [{}, [], (), set(), [None] * 8, {4: None}, "transformers"])
def test_what_is_no_cache(thing, layer_idx):
    """A dict has an update and items, and would lose the states."""
    layer = GatedDeltaNet(64, head_dim=16, num_heads=2, layer_idx=layer_idx).eval()
    if thing == "transformers":
        thing = pytest.importorskip("transformers").DynamicCache()
    with torch.no_grad(), pytest.raises(TypeError, match=r"past_key_values: expected a deltic.lay"):
        layer(torch.randn(1, 3, 64), past_key_values=thing, use_cache=True)


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("name", list(LAYERS))
def test_errors_of_the_operators_are_the_layers_own(name, convolution, monkeypatch):
    layer = LAYERS[name](hidden_size=64, num_heads=2, layer_idx=0, use_short_conv=convolution)
    own, x = type(layer).__name__, torch.randn(2, 12, 64)
    with torch.no_grad():
        for training, tokens in ((True, 12), (False, 12), (False, 1)):
            layer.train(training)
            text = rf"^{own}: hidden_states: expected fp32, bf16 or fp16, got fp64 \(taken by"
            with pytest.raises(TypeError, match=text) as caught:
                layer.double()(x[:, :tokens].double())
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
            cache = layer.float()(x, use_cache=True)[2].to(torch.float64)
            for use_cache in (True, False):
                text = f"^{own}: past_key_values: expected fp32.*, got fp64"
                with pytest.raises(TypeError, match=text):
                    layer(x[:, :tokens], past_key_values=cache, use_cache=use_cache)
        monkeypatch.setenv("DELTIC_IMPL", "reference")
        assert layer.double()(x.double())[0].dtype == torch.float64


def test_other_errors_inside_a_layer_stay(monkeypatch):
    layer = ShortConvolution(16, 4)
    with pytest.raises(TypeError, match=r"^ShortConvolution: x: expected fp32, .*, got fp64"):
        layer.double()(torch.randn(1, 5, 16).double())
    net = DeltaNet(hidden_size=64, num_heads=2)

    def fails(x):
        raise ValueError("mine: x: expected another, got this")

    monkeypatch.setattr(net.q_proj, "forward", fails)
    with pytest.raises(ValueError, match="^mine: x: expected another, got this$"):
        net(torch.randn(1, 5, 64))


def test_cache_goes_back_to_what_was_kept():
    layer = GatedDeltaNet(64, head_dim=16, num_heads=2, layer_idx=0).eval()
    x, cache = torch.randn(2, 12, 64), Cache()

    def go(begin, end):
        return layer(x[:, begin:end], past_key_values=cache, use_cache=True)[0]

    with torch.inference_mode():
        go(0, 5)
        cache.keep()
        expected = go(5, 8)
        go(8, 10)
        with pytest.raises(ValueError, match=r"crop: expected a length .*\(0, 5: .*, got 8$"):
            cache.crop(8)
        seen = cache.get_seq_length()
        with pytest.raises(ValueError, match=rf", got -1, which is {seen - 1} of {seen} tokens$"):
            cache.crop(-1)
        assert cache.get_seq_length() == 10  # refused, and as it was
        cache.crop(20)
        assert cache.get_seq_length() == 10
        for again in range(2):
            cache.crop(5 if again else -5)
            assert cache.get_seq_length() == 5
            assert torch.equal(go(5, 8), expected)
        # A copy has what was kept, and beams move it too.
        other = cache.clone()
        other.reorder([1, 0])
        other.crop(5)
        assert torch.equal(other[0]["recurrent_state"][0], cache._kept[5][0]["recurrent_state"][1])
        cache.crop(0)
        assert cache.get_seq_length() == 0 and len(cache) == 0


def test_cache_is_reordered_by_lists():
    state = torch.randn(3, 2, 4, 4)
    for indices in ([2, 0], (2, 0), torch.tensor([2, 0]), torch.tensor([2, 0], dtype=torch.int32)):
        cache = Cache()
        cache.update(recurrent_state=state, conv_state=(state,))
        cache.reorder(indices)
        assert torch.equal(cache[0]["recurrent_state"], state[[2, 0]])
        assert torch.equal(cache[0]["conv_state"][0], state[[2, 0]])


REFUSED = [
    (GatedDeltaNet, dict(num_v_heads=3), "num_v_heads: expected a multiple of num_heads=6, got 3"),
    (GatedDeltaNet, dict(num_v_heads=8), "num_v_heads: expected a multiple of num_heads=6, got 8"),
    (GatedDeltaNet, dict(num_v_heads=0), "num_v_heads: expected a multiple"),
    (KimiDeltaAttention, dict(num_v_heads=8), "num_v_heads: expected a multiple of num_heads=16"),
    (KimiDeltaAttention, dict(num_v_heads=24), "num_v_heads: expected a multiple"),
    (GatedDeltaNet, dict(head_dim=257), "head_dim: expected a key width of 1 to 256, got 257"),
    (DeltaNet, dict(num_heads=2), "head_dim: expected a key width of 1 to 256, got 512"),
    (DeltaNet, dict(num_heads=0), "num_heads: expected at least 1, got 0"),
    (KimiDeltaAttention, dict(num_heads=0), "num_heads: expected at least 1, got 0"),
    (DeltaNet, dict(num_heads=3), "expand_k: expected a width that is a multiple of num_heads=3"),
    (DeltaNet, dict(hidden_size=100, expand_v=0.333), "expand_v: expected a whole width"),
    (GatedDeltaNet, dict(head_dim=10, expand_v=1.25), "expand_v: expected a whole width, got 12.5"),
    (GatedDeltaNet, dict(mode="fused_chunk"), "mode: expected 'chunk' or 'fused_recurrent'"),
    (GatedDeltaNet, dict(output_gate_activation="relu"), "output_gate_activation: expected"),
    (GatedDeltaNet, dict(conv_size=0), "conv_size: expected at least 1, got 0"),
    (DeltaNet, dict(qk_activation="tanh"), "qk_activation: expected"),
    (DeltaNet, dict(qk_norm="l1"), "qk_norm: expected 'l2' or 'sum', got 'l1'"),
    (DeltaNet, dict(use_output_norm=False), "use_output_norm: expected True, got False"),
    (KimiDeltaAttention, dict(safe_gate=True), "lower_bound: expected a number below 0 with"),
    (KimiDeltaAttention, dict(lower_bound=0.5), "lower_bound: expected a number below 0 or None"),
    (KimiDeltaAttention, dict(lower_bound=float("-inf")), "lower_bound: expected"),
]


@pytest.mark.parametrize(("layer", "said", "text"), REFUSED)
def test_constructors_refuse(layer, said, text):
    with pytest.raises(ValueError) as refusal:
        layer(**said)
    assert str(refusal.value).startswith(f"{layer.__name__}: {text}")


def test_unknown_argument():
    with pytest.raises(TypeError, match="num_kv_heads"):
        GatedDeltaNet(num_kv_heads=2)


def test_calls_refuse():
    layer = build("GatedDeltaNet")
    x = rows(layer, 2, 6)
    layer(x, position_ids=torch.arange(6), cache_position=torch.arange(6))
    offsets = torch.tensor([0, 6])
    name = "GatedDeltaNet: "
    for error_type, args, said, text in [
        (TypeError, (x,), {"position_bias": 1}, "position_bias: expected no such argument"),
        (TypeError, (x,), {"past_key_values": 3}, "past_key_values: expected a deltic.layers.Ca"),
        (ValueError, (x,), {"output_attentions": True}, "output_attentions: expected False"),
        (ValueError, (x[0],), {}, "hidden_states: expected shape [batch, tokens, 32], got shape"),
        (ValueError, (x[..., 1:],), {}, "hidden_states: expected shape"),
        (ValueError, (x, torch.ones(2, 6, 6)), {}, "attention_mask: expected [batch, tokens] of"),
        (ValueError, (x, torch.ones(2, 5)), {}, "attention_mask: expected [batch, tokens] of"),
        (ValueError, (x, torch.ones(3, 6)), {}, "attention_mask: expected [batch, tokens] of"),
        (ValueError, (x, torch.full((2, 6), 0.5)), {}, "attention_mask: expected [batch, tokens]"),
        (ValueError, (x,), {"cu_seqlens": offsets}, "hidden_states: expected a batch of 1 with"),
        (ValueError, (x[:1],), {"cu_seqlens": [0, 6]}, "cu_seqlens: expected [sequences + 1]"),
        (ValueError, (x[:1],), {"cu_seqlens": offsets[:1]}, "cu_seqlens: expected [sequences"),
    ]:
        with pytest.raises(error_type) as refusal:
            layer(*args, **said)
        assert str(refusal.value).startswith(name + text)
    _, cache = in_parts(layer, x, [6])
    with pytest.raises(ValueError, match="past_key_values: expected states of 1 sequences, got 2"):
        layer(x[:1], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="layer_idx: expected this layer's place in the cache"):
        build("GatedDeltaNet", layer_idx=None)(x, use_cache=True)


def test_bad_offsets():
    layer = build("KDA")
    for offsets in ([0, 4, 3], [1, 6], [0, 7], [0, -1, 6]):
        for taps in (8, 0):
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                patch.setattr(short_convolution, "_MOST_TAPS", taps)
                with pytest.raises(ValueError, match="cu_seqlens: expected"):
                    layer(rows(layer, 1, 6), cu_seqlens=torch.tensor(offsets))


def test_nothing_to_do():
    for name in SOME:
        layer = build(name)
        x = rows(layer, 2, 6)
        with torch.no_grad():
            assert layer(x[:, :0])[0].shape == (2, 0, layer.hidden_size)
            assert layer(x[:0])[0].shape == (0, 6, layer.hidden_size)
            o, cache = in_parts(layer, x, [4, 0, 2])
            check(o, expected(layer, x))
            assert not layer(x, attention_mask=torch.zeros(2, 6))[0].any()


def test_every_name_is_documented():
    for name in deltic.layers.__all__:
        assert getattr(deltic.layers, name).__doc__
    assert importlib.import_module("deltic.layers").__doc__
