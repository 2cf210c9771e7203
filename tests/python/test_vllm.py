"""vLLM's layers on deltic: the switch, and steps on pools and batches as that server has them."""

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
from deltic.integrations import vllm as plugin
from servers import CLASSES, PLACES, Layer, Original, Sizes, W, ints, put_modules, vllm_modules
from support import ROOT, error, python

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("vllm") is not None


class Server:
    """vLLM's modules with deltic in them."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch

    def module(self, kind):
        return importlib.import_module(PLACES[kind])

    def layer(self, kind, given: Layer):
        """A layer of a class without its projections."""
        owner = getattr(self.module(kind), CLASSES[kind])
        made = owner.__new__(owner)
        if isinstance(made, torch.nn.Module):
            torch.nn.Module.__init__(made)
        for name, value in given.attributes().items():
            setattr(made, name, value)
        return made

    def batch(self, kind, given: Layer, **description):
        """A batch's description, which the layers of the kind find."""
        module = self.module(kind)
        counts = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")
        counts += ("num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens")
        m = module.GDNAttentionMetadata(**{**dict.fromkeys(counts, 0), **description})
        context = SimpleNamespace(attn_metadata={given.prefix: m})
        self.monkeypatch.setattr(module, "get_forward_context", lambda: context)
        first = given.sizes.dim_first
        self.monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: first)
        return m

    def run(self, kind, given: Layer, rows, count=None):
        """The layer's core on rows; o of its output's memory, which is longer than the batch."""
        x, g, beta, z = rows
        layer, s = self.layer(kind, given), given.sizes
        shape = (x.shape[0] if count is None else count, s.HV, s.V)
        out = torch.full(shape, 7.0, dtype=x.dtype, device=x.device)
        if kind == "kimi":
            layer._forward(
                mixed_qkv=x,
                g1=g.unsqueeze(0),
                g2=z,
                beta=beta.unsqueeze(0),
                core_attn_out=out[None],
            )
        else:
            layer._forward_core(mixed_qkv=x, b=beta, a=g, core_attn_out=out)
        return out


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "installed", marks=pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
        ),
    ]
)
def server(request, monkeypatch):
    if request.param == "stand-in":
        put_modules(monkeypatch, vllm_modules())
    with plugin.enable():
        yield Server(monkeypatch)
    plugin.disable()


def near(found, expected, limit=6e-3):
    assert error(found.float(), expected) <= limit


def untouched(layer: Layer, before, slots, windows):
    """No byte of other slots' pages has changed, nor of the gaps in any."""
    written = layer.memory.clone()
    for slot in range(layer.sizes.slots):
        if slot not in slots and slot not in windows:
            assert torch.equal(layer.memory[slot], before[slot]), f"slot {slot}"
    layer.states.zero_(), layer.windows.zero_()
    gaps = layer.memory.clone()
    layer.memory.copy_(before)
    layer.states.zero_(), layer.windows.zero_()
    assert torch.equal(gaps, layer.memory)
    layer.memory.copy_(written)


def normed(layer: Layer, o, z, kind):
    """What the layer's norm makes of it, where its core has one."""
    if kind != "kimi":
        return o
    x = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * layer.norm_weight.double() * torch.sigmoid(z.double())


KINDS = {
    "qwen": ("qwen", Sizes()),
    "qwen_bf16": ("qwen", Sizes(state=torch.bfloat16, H=2, HV=4)),
    "qwen_dim_first": ("qwen", Sizes(dim_first=True, K=64, V=32)),
    "olmo": ("olmo", Sizes(doubled=True)),
    "kimi": ("kimi", Sizes("channel")),
    "kimi_bounded": ("kimi", Sizes("channel", -5.0, state=torch.bfloat16)),
}
kinds = pytest.mark.parametrize("name", KINDS)


def made(name, drafts=0, seed=0):
    kind, sizes = KINDS[name]
    values = {**vars(sizes), "drafts": drafts}
    return kind, Layer(Sizes(**values), seed=seed)


@kinds
def test_decode_with_padded_rows(server, name):
    kind, layer = made(name)
    rows, before = layer.rows(4), layer.memory.clone()
    states, windows = layer.states.clone(), layer.window().clone()
    index = ints(3, 0, 5, -1)  # graphs have rows of nobody
    server.batch(
        kind,
        layer,
        num_decodes=4,
        num_decode_tokens=4,
        num_actual_tokens=4,
        non_spec_state_indices_tensor=index,
        non_spec_query_start_loc=ints(0, 1, 2, 3, 4),
    )
    out = server.run(kind, layer, rows, count=6)
    x, g, beta, z = rows
    limit = 6e-3 if layer.sizes.state == torch.float32 else 8e-3
    for n in (0, 2):
        slot, token = int(index[n]), slice(n, n + 1)
        o, after, inputs = layer.expect(
            x[token], g[token], beta[token], states[slot], windows[slot]
        )
        near(out[token], normed(layer, o, z[token], kind), limit)
        near(layer.states[slot], after[-1], limit)
        assert torch.equal(layer.window()[slot], inputs[1:].T.bfloat16())
    assert out[[1, 3]].count_nonzero() == 0
    assert (out[4:] == 7).all()
    untouched(layer, before, {3, 5}, {3, 5})


def prompts(server, kind, layer, lengths, index, has, decodes=0, **more):
    cu = [0]
    for length in [1] * decodes + lengths:
        cu.append(cu[-1] + length)
    first = ints(*(c - decodes for c in cu[decodes:]))
    has = torch.tensor([True] * decodes + has)
    return server.batch(
        kind,
        layer,
        num_prefills=len(lengths),
        num_prefill_tokens=sum(lengths),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_actual_tokens=cu[-1],
        non_spec_state_indices_tensor=index,
        non_spec_query_start_loc=ints(*cu),
        has_initial_state=has,
        prefill_query_start_loc=first,
        prefill_state_indices=index[decodes:],
        prefill_has_initial_state=has[decodes:],
        **more,
    )


@kinds
@pytest.mark.parametrize("decodes", [0, 2])
def test_prompts_go_straight_to_their_slots(server, name, decodes):
    kind, layer = made(name, seed=1)
    index = ints(4, 6, 7, 2, 1)[2 - decodes :]
    states, windows = layer.states.clone(), layer.window().clone()
    before, rows = layer.memory.clone(), layer.rows(decodes + 70 + 3 + 9)
    prompts(server, kind, layer, [70, 3, 9], index, [True, False, True], decodes)
    out = server.run(kind, layer, rows)
    x, g, beta, z = rows
    at = 0
    for n, length in enumerate([1] * decodes + [70, 3, 9]):
        slot, tokens = int(index[n]), slice(at, at + length)
        fresh = n == decodes + 1
        o, after, inputs = layer.expect(
            x[tokens],
            g[tokens],
            beta[tokens],
            states[slot] * (not fresh),
            windows[slot] * (not fresh),
        )
        near(out[tokens], normed(layer, o, z[tokens], kind), 1e-2)
        near(layer.states[slot], after[-1], 1e-2)
        assert torch.equal(layer.window()[slot], inputs[-(W - 1) :].T.bfloat16())
        at += length
    untouched(layer, before, set(index.tolist()), set(index.tolist()))


def test_checkpoints_inside_prompts(server):
    kind, layer = made("qwen", seed=2)
    checkpoint = SimpleNamespace(
        checkpoint_offsets=ints(0, 64, 0), state_indices=ints(0, 8, 0), offsets=None
    )
    index, rows = ints(1, 4, 5), layer.rows(1 + 100 + 20)
    windows = layer.window().clone()
    prompts(server, kind, layer, [100, 20], index, [False, False], 1, checkpoint=checkpoint)
    out = server.run(kind, layer, rows)
    x, g, beta, _ = rows
    tokens = slice(1, 101)
    o, after, inputs = layer.expect(
        x[tokens],
        g[tokens],
        beta[tokens],
        torch.zeros_like(layer.states[4]),
        torch.zeros_like(windows[4]),
    )
    near(out[tokens], o, 1e-2)
    near(layer.states[8], after[63])
    near(layer.states[4], after[99])
    assert torch.equal(layer.window()[8], inputs[64 : 64 + W - 1].T.bfloat16())


def drafts(server, kind, layer, table, lengths, accepted, **more):
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    given = dict(
        num_spec_decodes=len(lengths),
        num_spec_decode_tokens=cu[-1],
        num_actual_tokens=cu[-1],
        # vLLM's buffers are as long as its largest graph.
        spec_state_indices_tensor=torch.cat((table, ints(*[0] * 6).view(2, 3))),
        spec_query_start_loc=ints(*cu),
        num_accepted_tokens=accepted,
        spec_sequence_masks=torch.ones(len(lengths), dtype=torch.bool),
    )
    return server.batch(kind, layer, **{**given, **more})


@kinds
def test_drafted_tokens_read_by_what_was_accepted(server, name):
    kind, layer = made(name, drafts=2, seed=3)
    table = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 5, 6]], dtype=torch.int32)
    states, windows = layer.states.clone(), layer.window().clone()
    before, rows = layer.memory.clone(), layer.rows(6)
    drafts(
        server,
        kind,
        layer,
        table,
        [3, 0, 2],
        ints(2, 1, 3),
        num_actual_tokens=6,
        spec_query_start_loc=ints(0, 3, 3, 5),
    )
    out = server.run(kind, layer, rows)
    x, g, beta, z = rows
    for n, start, length, accepted in ((0, 0, 3, 2), (2, 3, 2, 3)):
        tokens, slots = slice(start, start + length), table[n].tolist()
        past = windows[slots[0]][:, accepted - 1 : accepted - 1 + W - 1]
        o, after, inputs = layer.expect(
            x[tokens], g[tokens], beta[tokens], states[slots[accepted - 1]], past
        )
        near(out[tokens], normed(layer, o, z[tokens], kind), 8e-3)
        for t in range(length):
            near(layer.states[slots[t]], after[t], 8e-3)
        left = inputs[1:].T.bfloat16()
        assert torch.equal(layer.window()[slots[0]][:, : left.shape[1]], left)
    assert out[5].count_nonzero() == 0  # past the last offset
    untouched(layer, before, {1, 2, 3, 4, 5}, {1, 4})


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_drafts_between_prompts(server, name):
    kind, layer = made(name, drafts=2, seed=4)
    other = Layer(layer.sizes, seed=4)
    table, index = torch.tensor([[1, 2, 3]], dtype=torch.int32), ints(7)
    rows = layer.rows(5 + 3 + 4)
    where, others = torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2, 3, 4, 8, 9, 10, 11])
    index, has = ints(7, 8), torch.tensor([False, True])
    plain = dict(
        num_prefills=2,
        num_prefill_tokens=9,
        non_spec_state_indices_tensor=index,
        non_spec_query_start_loc=ints(0, 5, 9),
        has_initial_state=has,
        prefill_query_start_loc=ints(0, 5, 9),
        prefill_state_indices=index,
        prefill_has_initial_state=has,
    )
    drafts(
        server,
        kind,
        layer,
        table,
        [3],
        ints(2),
        num_actual_tokens=12,
        spec_token_indx=where,
        non_spec_token_indx=others,
        spec_sequence_masks=torch.tensor([False, True, False]),
        **plain,
    )
    out = server.run(kind, layer, rows)
    drafts(server, kind, other, table, [3], ints(2))
    alone = server.run(kind, other, tuple(t[5:8] for t in rows))
    server.batch(kind, other, num_actual_tokens=9, **plain)
    rest = server.run(kind, other, tuple(t[others] for t in rows))
    assert torch.equal(out[5:8], alone) and torch.equal(out[others], rest)
    assert torch.equal(layer.memory, other.memory)


def test_the_norm_behind_drafted_tokens(server):
    kind, layer = made("qwen", drafts=2, seed=5)
    other, table = Layer(layer.sizes, seed=5), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    x, g, beta, z = layer.rows(3)
    drafts(server, kind, layer, table, [3], ints(1))
    out = torch.full((4, 2, 128), 7.0).bfloat16()
    server.layer(kind, layer)._forward_core_fused_norm(
        mixed_qkv=x, b=beta, a=g, output_gate=z, core_attn_out=out
    )
    o = server.run(kind, other, (x, g, beta, z))
    expected = deltic.rms_norm(o, layer.norm_weight, z, eps=1e-5)
    assert torch.equal(out[:3], expected) and (out[3:] == 7).all()
    assert torch.equal(layer.memory, other.memory)


def test_profiling_runs_have_no_batch(server):
    kind, layer = made("qwen")
    server.batch(kind, layer)
    empty = SimpleNamespace(attn_metadata=None)
    server.monkeypatch.setattr(server.module(kind), "get_forward_context", lambda: empty)
    before = layer.memory.clone()
    assert (server.run(kind, layer, layer.rows(3)) == 7).all()
    assert torch.equal(layer.memory, before)
    server.layer(kind, layer)._warmup_prefill_kernels(layer.rows(1)[0], 0)


def test_the_operator_over_prompts(server):
    module = server.module("qwen")
    if getattr(module, "__file__", None) is not None:  # vLLM itself, which has a configuration
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        chosen = ("auto", "triton")
        server.monkeypatch.setattr(module, "_resolve_gdn_prefill_backend", lambda _: chosen)
        server.monkeypatch.setattr(module, "_log_gdn_backend_decision", lambda *_: None)
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            operator = module.ChunkGatedDeltaRule()
    else:
        operator = module.ChunkGatedDeltaRule()
    assert type(operator).__name__ == "DelticChunkGatedDeltaRule"
    layer = Layer(Sizes(H=1, HV=2))
    q, k = (
        torch.nn.functional.normalize(layer.draw(1, 80, 1, 128), dim=-1).bfloat16() for _ in "qk"
    )
    v, g = layer.draw(1, 80, 2, 128).bfloat16(), -layer.draw(1, 80, 2).abs()
    beta, state = torch.rand(1, 80, 2), layer.draw(2, 2, 128, 128)
    out = torch.full((90, 2, 128), 7.0).bfloat16()
    call = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=ints(0, 70, 80),
        chunk_indices=None,
        chunk_offsets=None,
        use_qk_l2norm_in_kernel=False,
        core_attn_out=out,
    )
    o, last = operator(**call)
    expected, final = deltic.delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=ints(0, 70, 80),
        state_layout="vk",
    )
    assert torch.equal(o, expected) and torch.equal(last, final)
    assert torch.equal(out[:80], expected[0]) and (out[80:] == 7).all()


# ---- Functions of other layers -------------------------------------------------------------------


def channel_rows(layer: Layer, count):
    x, g, beta, _ = layer.rows(count)
    s = layer.sizes
    q, k, v = x.split([s.H * s.K, s.H * s.K, s.HV * s.V], -1)
    shapes = ((s.H, s.K), (s.H, s.K), (s.HV, s.V))
    return (
        x,
        [t.unflatten(-1, shape)[None] for t, shape in zip((q, k, v), shapes, strict=True)],
        g,
        beta,
    )


@pytest.mark.parametrize("bound", [None, -5.0])
def test_functions_of_k3(server, bound):
    ops, layer = server.module("k3_ops"), Layer(Sizes("channel", bound, drafts=2), seed=6)
    x, (q, k, v), g, beta = channel_rows(layer, 5)
    gate = {"gate": "softplus" if bound is None else "bounded", "lower_bound": bound}
    gate |= {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "beta_form": "sigmoid"}
    form = {**gate, "qk_l2norm": True, "state_layout": "vk"}
    params = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "lower_bound": bound}
    raw = {"raw_g": g[None], "raw_beta": beta[None]}
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    cu, pool = ints(0, 3, 5), layer.states.clone()
    out = torch.empty(1, 5, 2, 128, dtype=torch.bfloat16)
    o, state = ops.fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        **raw,
        **params,
        initial_state=layer.states,
        cu_seqlens=cu,
        ssm_state_indices=table,
        num_accepted_tokens=ints(1, 2, 9),
        out=out,
    )
    expected = deltic.decode(
        q,
        k,
        v,
        g=g[None],
        beta=beta[None],
        **form,
        state_pool=pool,
        read_index=table,
        accepted=ints(1, 2),
        cu_seqlens=cu,
    )
    assert o is out and state is layer.states and torch.equal(o, expected)
    assert torch.equal(layer.states, pool)
    index = ints(3, 0, 5, 1, -1)
    o, _ = ops.fused_recurrent_kda_packed_decode(
        mixed_qkv=x, **raw, **params, initial_state=layer.states, state_indices=index
    )
    expected = deltic.decode(
        *(t.transpose(0, 1) for t in (q, k, v)),
        g=g[:, None],
        beta=beta[:, None],
        **form,
        state_pool=pool,
        read_index=index,
        null_slot=0,
    )
    assert o.shape == (1, 5, 2, 128) and torch.equal(o[0], expected[:, 0])
    assert torch.equal(layer.states, pool)
    params["g_bias"] = params.pop("dt_bias")
    o, last = ops.chunk_kda_with_fused_gate(
        q=q,
        k=k,
        v=v,
        **raw,
        **params,
        initial_state=pool[1:3],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu,
    )
    expected, final = deltic.delta_rule(
        q,
        k,
        v,
        g=g[None],
        beta=beta[None],
        **form,
        initial_state=pool[1:3],
        output_final_state=True,
        cu_seqlens=cu,
    )
    assert torch.equal(o, expected) and torch.equal(last, final)


def test_functions_of_glm_and_bailing(server):
    for kind in ("glm", "bailing"):
        try:
            module = server.module(kind)
        except ImportError as missing:
            pytest.skip(f"{kind}: {missing}")
        layer = Layer(Sizes("channel", -5.0), seed=7)
        _, (q, k, v), g, beta = channel_rows(layer, 5)
        pool, index, cu = layer.states.clone(), ints(3, 5, 0), ints(0, 1, 2, 3)
        form = {"qk_l2norm": True, "state_layout": "vk", "cu_seqlens": cu}
        call = dict(
            q=q,
            k=k,
            v=v,
            initial_state=layer.states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu,
            ssm_state_indices=index,
        )
        if kind == "glm":
            gate = {"gate": "bounded", "lower_bound": -5.0, "beta_form": "sigmoid"}
            form |= {**gate, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
            call |= dict(g=g[None], beta=beta[None], sigmoid_beta=True, compute_gate=True)
            call |= dict(a_log=layer.A_log, g_bias=layer.dt_bias, lower_bound=-5.0)
            mine = {"g": g[None], "beta": beta[None]}
        else:
            mine = {"g": -g[None].float().abs(), "beta": beta[None].sigmoid()}
            call |= {**mine, "safe_gate": True, "lower_bound": -5.0}
        o, _ = module.fused_recurrent_kda(**call)
        read = {"state_pool": pool, "read_index": index, "null_slot": 0}
        assert torch.equal(o, deltic.decode(q, k, v, **mine, **form, **read))
        assert torch.equal(layer.states, pool)
        rest = dict(initial_state=pool[1:4], output_final_state=True, cu_seqlens=cu)
        expected = deltic.delta_rule(q, k, v, **mine, **{**form, **rest})
        rest |= {"use_qk_l2norm_in_kernel": True, "lower_bound": -5.0}
        if kind == "glm":
            o, last = module.chunk_kda_with_fused_gate(
                q,
                k,
                v,
                raw_g=g[None],
                beta=beta[None].sigmoid(),
                A_log=layer.A_log,
                g_bias=layer.dt_bias,
                safe_gate=True,
                **rest,
            )
            near(o, expected[0]), near(last, expected[1])
        else:
            o, last = module.chunk_kda(q, k, v, **mine, safe_gate=True, **rest)
            assert torch.equal(o, expected[0]) and torch.equal(last, expected[1])


def test_convolutions(server):
    module, layer = server.module("k3"), Layer(Sizes(drafts=2), seed=8)
    x, window = layer.rows(9)[0], layer.window()
    copy, cu, index = window.clone(), ints(0, 4, 9), ints(3, 5)
    has = torch.tensor([True, False])
    y = module.causal_conv1d_fn(
        x.T,
        layer.weight,
        None,
        conv_states=window,
        query_start_loc=cu,
        cache_indices=index,
        has_initial_state=has,
        activation="silu",
        metadata=object(),
    )
    expected, _ = deltic.causal_conv1d(
        x[None],
        layer.weight,
        activation="silu",
        cu_seqlens=cu,
        state=copy[:, :, : W - 1],
        state_index=index,
        has_initial_state=has,
    )
    assert torch.equal(y.T, expected[0]) and torch.equal(window, copy)
    out = torch.empty(2, layer.sizes.D, dtype=torch.bfloat16)
    y = module.causal_conv1d_update(
        x[:2],
        window,
        layer.weight,
        None,
        "silu",
        conv_state_indices=ints(0, 5),
        out=out,
        validate_data=True,
    )
    expected = deltic.causal_conv1d_update(
        x[:2], copy[:, :, : W - 1], layer.weight, activation="silu", state_index=ints(-1, 5)
    )
    assert torch.equal(y, expected) and torch.equal(out, expected) and torch.equal(window, copy)
    call = dict(num_accepted_tokens=ints(2, 1), max_query_len=3)
    y = module.causal_conv1d_update(
        x[:5],
        window,
        layer.weight,
        None,
        "silu",
        conv_state_indices=index,
        query_start_loc=ints(0, 3, 5),
        **call,
    )
    expected = deltic.causal_conv1d_update(
        x[None, :5],
        copy,
        layer.weight,
        activation="silu",
        state_index=index,
        accepted=ints(2, 1),
        cu_seqlens=ints(0, 3, 5),
    )
    assert torch.equal(y, expected[0]) and torch.equal(window, copy)


# ---- The switch ----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A stand-in without deltic in it."""
    modules = vllm_modules()
    put_modules(monkeypatch, modules)
    yield modules
    plugin.disable()


def test_on_and_off(small):
    qwen = small[PLACES["qwen"]]
    owner, registry = qwen.QwenGatedDeltaNetAttention, small["vllm.model_executor.custom_op"]
    before = dict(vars(owner))
    names = {name: dict(vars(small[PLACES[name]])) for name in ("k3", "k3_ops", "glm", "bailing")}
    report = plugin.enable()
    assert str(report).startswith("vLLM 0.33.0: replaced 20\n")
    assert "QwenGatedDeltaNetAttention._forward_core -> deltic" in str(report)
    assert report.line().startswith(
        "vLLM 0.33.0: replaced QwenGatedDeltaNetAttention._forward_core,"
    )
    assert "\n" not in report.line() and report.left == {}
    assert vars(owner)["_forward_core"] is not before["_forward_core"]
    assert registry.op_registry_oot["ChunkGatedDeltaRule"].__mro__[1] is qwen.ChunkGatedDeltaRule
    again = plugin.enable()
    assert again.done == [] and set(again.left.values()) == {"replaced before"}
    back = plugin.disable()
    assert len(back.done) == 20 and back.left == {}
    assert dict(vars(owner)) == before and registry.op_registry_oot == {}
    assert all(dict(vars(small[PLACES[name]])) == names[name] for name in names)
    with plugin.enable():
        assert vars(owner)["_forward_core"] is not before["_forward_core"]
    assert dict(vars(owner)) == before


def test_what_is_not_taken_goes_to_the_original(small, caplog):
    layer = Layer(Sizes("channel"), seed=6)
    _, (q, k, v), g, beta = channel_rows(layer, 3)
    call = dict(A_log=layer.A_log, dt_bias=None, lower_bound=None, cu_seqlens=ints(0, 1, 2, 3))
    call |= dict(raw_g=g[None], raw_beta=beta[None], ssm_state_indices=ints(1, 2, 3))
    with plugin.enable(), caplog.at_level(logging.WARNING, "deltic.integrations"):
        ops = small[PLACES["k3_ops"]]
        with pytest.raises(Original, match="fused_recurrent_kda"):
            ops.fused_recurrent_kda(q.double(), k, v, **call, initial_state=layer.states)
        with pytest.raises(Original):
            small[PLACES["k3"]].causal_conv1d_update(layer.rows(2)[0], layer.window(), layer.weight)
        with pytest.raises(Original):
            small[PLACES["glm"]].fused_recurrent_kda(q, k, v, g[None], beta[None], unheard_of=True)
    texts = [record.getMessage() for record in caplog.records]
    assert "fused_recurrent_kda: handed to the original: torch.float64 rows" in texts
    assert "causal_conv1d_update: handed to the original: no list of slots" in texts
    assert "fused_recurrent_kda: handed to the original: the argument 'unheard_of'" in texts


def test_other_versions_are_named(monkeypatch, small):
    small["vllm"].__version__ = "0.11.2"
    with pytest.raises(ImportError) as text:
        plugin.enable()
    assert str(text.value) == (
        "deltic.integrations.vllm: vLLM: expected 0.32 or later, whose layers are in "
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn, got 0.11.2"
    )
    small["vllm"].__version__ = "0.99.0"
    owner = small[PLACES["qwen"]].QwenGatedDeltaNetAttention

    def _forward_core(self, mixed_qkvz, ba, core_attn_out):
        raise AssertionError

    monkeypatch.setattr(owner, "_forward_core", _forward_core)
    monkeypatch.delattr(small[PLACES["kimi"]].KimiGatedDeltaNetAttention, "_forward")
    monkeypatch.delattr(small[PLACES["olmo"]], "is_conv_state_dim_first")
    monkeypatch.delitem(sys.modules, PLACES["glm"])
    with plugin.enable() as report:
        assert vars(owner)["_forward_core"] is _forward_core
    left = report.left
    assert left["QwenGatedDeltaNetAttention._forward_core"] == (
        "expected an argument 'mixed_qkv', got (self, mixed_qkvz, ba, core_attn_out)"
    )
    assert left["KimiGatedDeltaNetAttention._forward"] == "not in this version"
    olmo = left["OlmoHybridGatedDeltaNetAttention._forward_core"]
    assert olmo == "its module has no is_conv_state_dim_first"
    assert left[PLACES["glm"]].startswith("not in this version: ")
    for name in set(PLACES.values()):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ImportError, match="vLLM: expected one of the layers that are known here, got"
    ):
        plugin.enable()


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm():
    with pytest.raises(
        ImportError, match=r"vLLM: expected an installed package \(pip install vllm\)"
    ):
        plugin.enable()
    plugin.register()  # says it in the log, and nothing else


def test_another_plugin_keeps_its_class(small):
    theirs = type("Theirs", (), {"__module__": "elsewhere"})
    small["vllm.model_executor.custom_op"].op_registry_oot["ChunkGatedDeltaRule"] = theirs
    report = plugin.enable()
    assert report.left == {"ChunkGatedDeltaRule": "elsewhere.Theirs is registered for it"}
    plugin.disable()
    assert small["vllm.model_executor.custom_op"].op_registry_oot["ChunkGatedDeltaRule"] is theirs


def test_plugins_wait_for_the_layers(tmp_path, monkeypatch, caplog):
    """The entry point imports nothing; layers change when somebody imports them."""
    folder = tmp_path / "vllm" / "model_executor" / "layers" / "mamba" / "gdn"
    folder.mkdir(parents=True)
    for place in (folder, *list(folder.parents)[:4]):
        (place / "__init__.py").write_text("")
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.33.0'\n")
    (tmp_path / "vllm" / "model_executor" / "custom_op.py").write_text("op_registry_oot = {}\n")
    (folder / "qwen_gdn_linear_attn.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom servers import PLACES, vllm_modules\n"
        "globals().update({n: v for n, v in vars(vllm_modules()[PLACES['qwen']]).items() "
        "if n[:2] != '__'})\n"
    )
    put_modules(monkeypatch, {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        plugin.register()
        plugin.register()
        assert PLACES["qwen"] not in sys.modules
        with caplog.at_level(logging.INFO, "vllm.deltic"):
            module = importlib.import_module(PLACES["qwen"])
        owner = module.QwenGatedDeltaNetAttention
        assert owner._forward_core.__wrapped__ is not None
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1 and lines[0].startswith("vLLM 0.33.0: replaced QwenGated")
        plugin.disable()
        assert not hasattr(owner._forward_core, "__wrapped__")
        assert not any(type(finder).__name__ == "Watch" for finder in sys.meta_path)
    finally:
        plugin.disable()
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys, deltic.integrations; print([m for m in ('vllm', 'sglang') "
    assert python(code + "if m in sys.modules])") == "[]"


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
def test_vllm_s_own_kernels_agree():
    """Its Triton kernels, run by Triton's interpreter, on the same batches in fp32."""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(HERE / "server_originals.py"), "vllm"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "vLLM agrees" in result.stdout


def test_entry_points():
    tomllib = pytest.importorskip("tomllib")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not among the copied files")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, extra in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        place, _, name = project["entry-points"][group]["deltic"].partition(":")
        assert callable(getattr(importlib.import_module(place), name))
        assert any(need.startswith(extra) for need in project["optional-dependencies"][extra])
