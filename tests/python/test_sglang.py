"""SGLang's linear attention on deltic: the backend's choice, and calls on that server's pools."""

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deltic
import pytest
import torch
from deltic.integrations import sglang as plugin
from deltic.integrations._sglang_kernel import Raw, may_split
from servers import (
    SGLANG_LINEAR,
    Layer,
    Original,
    Sizes,
    gates,
    ints,
    put_modules,
    rule,
    sglang_modules,
)
from support import error

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("sglang") is not None
GDN, KDA = f"{SGLANG_LINEAR}.gdn_backend", f"{SGLANG_LINEAR}.kda_backend"


@pytest.fixture
def small(monkeypatch):
    """A stand-in without deltic in it."""
    modules = sglang_modules()
    put_modules(monkeypatch, modules)
    yield modules
    plugin.disable()


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "installed", marks=pytest.mark.skipif(not INSTALLED, reason="SGLang is not installed")
        ),
    ]
)
def server(request, monkeypatch):
    """SGLang's modules with deltic in them."""
    if request.param == "stand-in":
        put_modules(monkeypatch, sglang_modules())
    with plugin.enable():
        yield monkeypatch
    plugin.disable()


def near(found, expected, limit=6e-3):
    assert error(found.float(), expected) <= limit


def made(per_channel, bound=None, state=torch.float32, seed=0, layers=3):
    """A layer whose states lie between those of others, as in SGLang's page-major pools."""
    layer = Layer(Sizes("channel" if per_channel else "head", bound, state=state), seed=seed)
    s = layer.sizes
    pool = torch.full((s.slots, layers, s.HV, s.V, s.K), 9.0, dtype=state)
    pool[:, 1] = layer.states
    layer.made["all"], layer.states = pool, pool[:, 1]
    return layer


def rows_of(layer, count):
    """Packed rows, q, k, v as slices of them, a, b."""
    x, g, beta, _ = layer.rows(count)
    s = layer.sizes
    q, k, v = x.split([s.H * s.K, s.H * s.K, s.HV * s.V], -1)
    shapes = ((s.H, s.K), (s.H, s.K), (s.HV, s.V))
    return x, *(t.unflatten(-1, e)[None] for t, e in zip((q, k, v), shapes, strict=True)), g, beta


def form(layer, per_channel):
    bound = layer.sizes.bound
    return {
        "gate": "softplus" if bound is None else "bounded",
        "lower_bound": bound,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "beta_form": "sigmoid",
        "qk_l2norm": True,
        "state_layout": "vk",
    }


def expected(layer, q, k, v, g, beta, state):
    log = gates(g, layer.A_log, layer.dt_bias, layer.sizes.bound)
    return rule(q, k, v, log, torch.sigmoid(beta.double()), state)


GATES = {"gdn": (False, None), "kda": (True, None), "kda_bounded": (True, -5.0)}
gates_of = pytest.mark.parametrize("name", GATES)
states_of = pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])


@gates_of
@states_of
def test_decode(server, name, state):
    per_channel, bound = GATES[name]
    layer = made(per_channel, bound, state)
    kernel = plugin.kernel(per_channel)
    x, q, k, v, g, beta = rows_of(layer, 4)
    before, index = layer.made["all"].clone(), ints(3, -1, 5, 0)
    call = dict(A_log=layer.A_log, dt_bias=layer.dt_bias, cache_indices=index)
    if bound is not None:
        call["lower_bound"] = bound
    o = kernel.packed_decode(
        x,
        g.flatten(1),
        beta,
        **call,
        scale=128**-0.5,
        ssm_states=layer.states,
        num_v_heads=2,
        head_v_dim=128,
        replayssm_d=None,
        replayssm_write_pos=None,
    )
    assert o.shape == (1, 4, 2, 128) and o[0, 1].count_nonzero() == 0
    limit = 6e-3 if state == torch.float32 else 8e-3
    for n in (0, 2, 3):
        slot, t = int(index[n]), slice(n, n + 1)
        row, after = expected(layer, q[0, t], k[0, t], v[0, t], g[t], beta[t], before[slot, 1])
        near(o[0, t], row, limit), near(layer.states[slot], after[-1], limit)
    others = [slot for slot in range(9) if slot not in (3, 5, 0)]
    assert torch.equal(layer.made["all"][others], before[others])
    assert torch.equal(layer.made["all"][:, [0, 2]], before[:, [0, 2]])
    after, layer.made["all"][:] = layer.made["all"].clone(), before
    again = kernel.decode(
        q,
        k,
        v,
        g.flatten(1)[None] if per_channel else g,
        beta[None] if per_channel else beta,
        **call,
        ssm_states=layer.states,
        query_start_loc=ints(0, 1, 2, 3, 4),
    )
    assert torch.equal(again, o) and torch.equal(layer.made["all"], after)


@gates_of
def test_prompts(server, name):
    per_channel, bound = GATES[name]
    layer, kernel = made(per_channel, bound), plugin.kernel(per_channel)
    _, q, k, v, g, beta = rows_of(layer, 210)
    before, index = layer.made["all"].clone(), ints(3, 5, 7)
    track, chunks = torch.full((3, 2, 128, 128), 7.0), ints(1, -1, 0)
    out = torch.full((1, 214, 2, 128), 7.0).bfloat16()[:, :210]
    call = dict(
        ssm_states=layer.states, cache_indices=index, query_start_loc=ints(0, 130, 200, 210)
    )
    call |= dict(track_state=track, track_chunk_idx=chunks, layer_id=0, extend_prefix_lens=None)
    if per_channel:
        call |= dict(A_log=layer.A_log, dt_bias=layer.dt_bias, lower_bound=bound)
        call |= dict(beta_is_raw=True, is_spec_decode=False, return_intermediate_states=True)
        call |= dict(track_ssm_h_src=ints(0), extend_seq_lens_cpu=[130, 70, 10])
        o, states = kernel.extend(q, k, v, g[None], beta[None], **call)
        assert states is None
    else:
        raw = Raw(g, {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "gate": "softplus"})
        o, last, states = kernel.extend(q, k, v, raw, beta, **call, output=out)
        assert last is None and states is None and o.data_ptr() == out.data_ptr()
        logs = gates(g, layer.A_log, layer.dt_bias).float()[None]
        after, layer.made["all"][:] = layer.made["all"].clone(), before
        plain, _, _ = kernel.extend(q, k, v, logs, beta.float().sigmoid()[None], **call)
        near(plain, o.double()), near(layer.made["all"], after.double(), 1e-3)
        layer.made["all"][:] = after
    for n, (start, stop) in enumerate(((0, 130), (130, 200), (200, 210))):
        t, slot = slice(start, stop), int(index[n])
        row, after = expected(layer, q[0, t], k[0, t], v[0, t], g[t], beta[t], before[slot, 1])
        near(o[0, t], row, 1e-2), near(layer.states[slot], after[-1], 1e-2)
        if n == 0:
            near(track[0], after[63])
    assert (track[1] == 7).all() and torch.equal(track[2], before[7, 1])
    assert torch.equal(layer.made["all"][:, [0, 2]], before[:, [0, 2]])


@gates_of
@states_of
def test_drafts_are_scored_beside_the_pool(server, name, state):
    per_channel, bound = GATES[name]
    layer, kernel = made(per_channel, bound, state, seed=2), plugin.kernel(per_channel)
    _, q, k, v, g, beta = rows_of(layer, 9)
    before, index = layer.made["all"].clone(), ints(3, 5, -1, 0, 0)
    rows, cu = ints(0, 1, 2, 3), ints(0, 4, 8, 8)  # the third sequence is padding
    scratch = torch.full((4, 4, 2, 128, 128), 7.0, dtype=state)
    call = dict(A_log=layer.A_log, dt_bias=layer.dt_bias, q=q, k=k, v=v, b=beta)
    call |= dict(a=g.flatten(1), ssm_states=layer.states, cache_indices=index)
    call |= dict(query_start_loc=cu, intermediate_states_buffer=scratch, cache_steps=4)
    call |= dict(intermediate_state_indices=rows, retrieve_parent_token=None, stable_rows=False)
    if bound is not None:
        call["lower_bound"] = bound
    o = kernel.target_verify(**call)
    assert torch.equal(layer.made["all"], before) and (scratch[2:] == 7).all()
    assert o[0, 8].count_nonzero() == 0
    pool = layer.states.clone()
    for n, start in ((0, 0), (1, 4)):
        for t in range(4):  # the bits of tokens decoded one by one
            one = slice(start + t, start + t + 1)
            row = deltic.decode(
                q[:, one],
                k[:, one],
                v[:, one],
                g=g[None, one],
                beta=beta[None, one],
                **form(layer, per_channel),
                state_pool=pool,
                read_index=index[n : n + 1],
            )
            assert torch.equal(o[:, one], row)
            assert torch.equal(scratch[n, t], pool[int(index[n])])
    # A tree: SGLang leaves a 0 as the first token's parent.
    call["retrieve_parent_token"] = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2], [0] * 4]).int()
    tree = kernel.target_verify(**call)
    assert torch.equal(tree[:, 4:8], o[:, 4:8])
    state_of = scratch[0, 0].clone()
    log = form(layer, per_channel)
    row, _ = deltic.recurrent(
        q[:, 2:3],
        k[:, 2:3],
        v[:, 2:3],
        g=g[None, 2:3],
        beta=beta[None, 2:3],
        **log,
        initial_state=state_of[None],
    )
    assert torch.equal(tree[:, 2:3], row)
    assert kernel._table(rows, 4) is kernel._table(rows, 4)


def test_choosing_the_backend(small):
    choices = small["sglang.srt.arg_groups.choices"].LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    gdn, kda = small[GDN], small[KDA]
    backend = small[f"{SGLANG_LINEAR}.utils"].LinearAttnKernelBackend
    before = {name: dict(vars(small[name])) for name in (GDN, KDA)}
    deltics = (backend("deltic"), backend("deltic"), backend("triton"))
    with pytest.raises(ValueError):
        gdn.GDNKernelDispatcher(*deltics)
    report = plugin.enable()
    assert str(report).startswith("SGLang 0.5.23: replaced 5\n") and report.left == {}
    assert "deltic" in choices
    for module, dispatcher, attention in (
        (gdn, "GDNKernelDispatcher", "GDNAttnBackend"),
        (kda, "KDAKernelDispatcher", "KDAAttnBackend"),
    ):
        plain = getattr(module, dispatcher)(*[backend("triton")] * 3)
        assert type(plain.decode_kernel).__name__.startswith("Triton")
        with pytest.raises(ValueError):  # what SGLang refuses it refuses still
            getattr(module, dispatcher)(backend("triton"), backend("flashinfer"), backend("triton"))
        made = getattr(module, dispatcher)(*deltics)
        for phase in ("decode", "extend", "verify", "tree_verify"):
            assert type(getattr(made, f"{phase}_kernel")).__name__ == "DelticKernel"
        assert made.supports_packed_decode and made.decode_kernel.supports_track_state_snapshot
        mixed = getattr(module, dispatcher)(backend("triton"), backend("deltic"), backend("triton"))
        assert type(mixed.decode_kernel).__name__.startswith("Triton")
        assert type(mixed.extend_kernel).__name__ == "DelticKernel"
        assert type(mixed.verify_kernel).__name__.startswith("Triton")
        assert getattr(module, attention) is not before[module.__name__][attention]
    back = plugin.disable()
    assert len(back.done) == 7 and "deltic" not in choices
    assert {name: dict(vars(small[name])) for name in (GDN, KDA)} == before


def test_the_server_s_arguments_say_whose_name_it_is(small, monkeypatch):
    backend = small[f"{SGLANG_LINEAR}.utils"].LinearAttnKernelBackend
    names = dict(linear_attn_backend="triton", linear_attn_decode_backend="theirs")
    names |= dict(linear_attn_prefill_backend="deltic", linear_attn_verify_backend=None)
    mamba = SimpleNamespace(**names)
    settings = SimpleNamespace(mamba=mamba, deterministic=SimpleNamespace())
    monkeypatch.setattr(small["sglang.srt.runtime_context"], "get_exec", lambda: settings)
    plugin.enable()
    with pytest.raises(ValueError, match="CUSTOM"):
        small[GDN].GDNKernelDispatcher(backend("theirs"), backend("deltic"), backend("triton"))
    mamba.linear_attn_decode_backend = None
    made = small[GDN].GDNKernelDispatcher(backend("triton"), backend("deltic"), backend("triton"))
    assert type(made.extend_kernel).__name__ == "DelticKernel"
    assert type(made.verify_kernel).__name__ == "TritonGDNKernel"
    mamba.linear_attn_backend = "deltic"
    made = small[GDN].GDNKernelDispatcher(backend("deltic"), backend("deltic"), backend("triton"))
    assert type(made.verify_kernel).__name__ == "DelticKernel"
    assert may_split() == "auto"
    settings.deterministic.enable_deterministic_inference = True
    assert may_split() == "off"


def backends_of(small, name="deltic"):
    backend = small[f"{SGLANG_LINEAR}.utils"].LinearAttnKernelBackend
    return [backend(name), backend(name), backend("triton")]


@pytest.mark.parametrize("kind", ["GDN", "KDA"])
def test_convolutions(small, kind):
    module = small[GDN if kind == "GDN" else KDA]
    original = module.causal_conv1d_update
    plugin.enable()
    assert module.causal_conv1d_update is original  # until somebody chooses the backend
    made = getattr(module, f"{kind}AttnBackend")(backends_of(small))
    layer = Layer(Sizes(), seed=3)
    x, window = layer.rows(9)[0], layer.window()
    copy, index = window.clone(), ints(3, 5)
    weights = SimpleNamespace(conv_weights=layer.weight, bias=None, activation="silu")
    made.forward_metadata = SimpleNamespace(query_start_loc=ints(0, 4, 9))
    batch = SimpleNamespace(extend_prefix_lens=ints(7, 0))
    y = made._convolve_prefill(weights, batch, x, window, index)
    rows, _ = deltic.causal_conv1d(
        x[None],
        layer.weight,
        activation="silu",
        cu_seqlens=ints(0, 4, 9),
        state=copy,
        state_index=index,
        has_initial_state=torch.tensor([True, False]),
    )
    assert torch.equal(y, rows[0]) and torch.equal(window, copy)
    y = module.causal_conv1d_update(
        x[:3], window, layer.weight, None, "silu", conv_state_indices=ints(3, -1, 5)
    )
    rows = deltic.causal_conv1d_update(
        x[:3], copy, layer.weight, activation="silu", state_index=ints(3, -1, 5)
    )
    assert torch.equal(y, rows) and torch.equal(window, copy)
    with pytest.raises(Original):  # windows after every token
        module.causal_conv1d_update(
            x[:3],
            window,
            layer.weight,
            None,
            "silu",
            conv_state_indices=ints(3, -1, 5),
            intermediate_conv_window=window,
            intermediate_state_indices=index,
        )
    plain = getattr(module, f"{kind}AttnBackend")(backends_of(small, "triton"))
    with pytest.raises(Original):
        plain._convolve_prefill(weights, batch, x, window, index)


def test_prompts_need_no_kernels_around(small):
    plugin.enable()
    layer = Layer(Sizes(), seed=3)
    g, beta = layer.rows(9)[1:3]
    parameters = SimpleNamespace(A_log=layer.A_log, dt_bias=layer.dt_bias)
    made = small[GDN].GDNAttnBackend(backends_of(small))
    raw, b = made._prefill_gates(parameters, g, beta)
    assert raw.rows is g and raw.options["A_log"] is layer.A_log and b is beta
    assert made.requires_contiguous_prefill_state is False
    mode = SimpleNamespace(is_target_verify=lambda: False)
    made._init_target_verify_qkv_routing(SimpleNamespace(forward_mode=mode))
    assert made._use_strided_target_verify_qkv is True
    plain = small[GDN].GDNAttnBackend(backends_of(small, "triton"))
    assert plain.requires_contiguous_prefill_state is True
    with pytest.raises(Original):
        plain._prefill_gates(parameters, g, beta)


def test_what_is_not_taken_goes_to_triton(small, caplog):
    plugin.enable()
    layer, kernel = made(False), plugin.kernel()
    x, q, k, v, g, beta = rows_of(layer, 4)
    call = dict(A_log=layer.A_log, dt_bias=layer.dt_bias, ssm_states=layer.states)
    call |= dict(cache_indices=ints(1, 2, 3, 4))
    packed = dict(scale=1.0, num_v_heads=2, head_v_dim=128)
    with caplog.at_level(logging.WARNING, "deltic.integrations"):
        with pytest.raises(Original, match="packed_decode"):
            kernel.packed_decode(x, g, beta, **call, **packed, replayssm_d=x)
        with pytest.raises(Original, match="decode"):
            kernel.decode(q.double(), k, v, g, beta, **call, query_start_loc=ints(0, 1, 2, 3, 4))
        with pytest.raises(Original, match="target_verify"):
            kernel.target_verify(
                q=q,
                k=k,
                v=v,
                a=g,
                b=beta,
                **call,
                query_start_loc=ints(0, 4),
                intermediate_states_buffer=torch.empty(2, 4, 2, 128, 128).transpose(0, 1),
                intermediate_state_indices=ints(0),
                cache_steps=4,
                retrieve_parent_token=None,
            )
        del call["A_log"], call["dt_bias"]
        with pytest.raises(Original, match="extend"):
            kernel.extend(
                q, k, v, g, beta, **call, query_start_loc=ints(0, 4), inplace_update=False
            )
        raw = Raw(g, {"A_log": layer.A_log, "dt_bias": layer.dt_bias})
        with pytest.raises(Original, match="fused_gdn_gating"):
            kernel.extend(
                q, k, v, raw, beta, **call, query_start_loc=ints(0, 4), inplace_update=False
            )
    texts = "\n".join(record.getMessage() for record in caplog.records)
    for reason in (
        "replayed states",
        "torch.float64 rows",
        "a scratch of strides",
        "not to be written",
    ):
        assert reason in texts


def test_other_versions_are_named(small, monkeypatch):
    small["sglang"].__version__ = "0.4.10"
    with pytest.raises(ImportError) as text:
        plugin.enable()
    assert str(text.value) == (
        "deltic.integrations.sglang: SGLang: expected 0.5.23 or later, whose dispatchers are in "
        "sglang.srt.layers.attention.linear.gdn_backend, got 0.4.10"
    )
    plugin.register()  # says it in the log, and nothing else
    small["sglang"].__version__ = "0.9.0"

    def __init__(self, backends):
        raise AssertionError

    monkeypatch.setattr(small[GDN].GDNKernelDispatcher, "__init__", __init__)
    monkeypatch.delattr(small[KDA].KDAAttnBackend, "_convolve_prefill")
    with plugin.enable() as report:
        assert small[GDN].GDNKernelDispatcher.__init__ is __init__
    wrong = "expected an argument 'decode_backend', got (self, backends)"
    assert report.left == {
        "GDNKernelDispatcher.__init__": wrong,
        "KDAAttnBackend": "it has no _convolve_prefill",
    }
    for name in (GDN, KDA):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ImportError, match="SGLang: expected one of the dispatchers that are known here"
    ):
        plugin.enable()


def test_registered_as_a_plugin(small, caplog, monkeypatch):
    choices = small["sglang.srt.arg_groups.choices"].LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    monkeypatch.setattr(small[KDA], "KDAKernelDispatcher", 7)  # something that nobody expects
    with caplog.at_level(logging.INFO, "sglang.deltic"):
        plugin.register()
    assert "deltic" in choices and any(type(f).__name__ == "Watch" for f in sys.meta_path)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "SGLang 0.5.23: replaced --linear-attn-backend"
    assert lines[1] == "SGLang 0.5.23: replaced GDNKernelDispatcher.__init__, GDNAttnBackend"
    assert "nothing replaced in sglang.srt.layers.attention.linear.kda_backend" in lines[2]
    made = small[GDN].GDNAttnBackend(backends_of(small))
    assert type(made.kernel_dispatcher.extend_kernel).__name__ == "DelticKernel"
    plugin.disable()
    assert "deltic" not in choices and not any(type(f).__name__ == "Watch" for f in sys.meta_path)


@pytest.mark.skipif(INSTALLED, reason="SGLang is installed")
def test_without_sglang():
    with pytest.raises(ImportError, match=r"expected an installed package \(pip install sglang\)"):
        plugin.enable()
    plugin.register()


@pytest.mark.skipif(not INSTALLED, reason="SGLang is not installed")
def test_sglang_s_own_kernels_agree():
    """Its Triton kernels, run by Triton's interpreter, on the same batches in fp32."""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(HERE / "server_originals.py"), "sglang"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "SGLang agrees" in result.stdout


@pytest.mark.skipif(not INSTALLED, reason="SGLang is not installed")
def test_sglang_s_own_dispatchers():
    names = importlib.import_module(f"{SGLANG_LINEAR}.utils").LinearAttnKernelBackend
    choices = importlib.import_module("sglang.srt.server_args")
    with plugin.enable() as report:
        assert report.left == {} and len(report.done) == 5
        for module, kind in ((GDN, "GDN"), (KDA, "KDA")):
            dispatcher = getattr(importlib.import_module(module), f"{kind}KernelDispatcher")
            made = dispatcher(names("deltic"), names("deltic"), names("triton"))
            for phase in ("decode", "extend", "verify"):
                assert type(getattr(made, f"{phase}_kernel")).__name__ == "DelticKernel"
        assert "deltic" in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    plugin.disable()
    assert "deltic" not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES
