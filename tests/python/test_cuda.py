"""The same calls with CUDA tensors: values, streams, graphs, layers, errors; needs a GPU."""

import time

import deltic
import deltic.fla.ops.gated_delta_rule
import deltic.fla.ops.kda
import pytest
import torch
from deltic._library import HAS_CUDA_BACKWARD
from deltic.fla.ops.common import (
    chunk_bwd_dqkwg,
    chunk_bwd_dv_local,
    chunk_fwd_o,
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
    chunk_scaled_dot_kkt_fwd,
)
from deltic.fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
from deltic.fla.ops.kda.gate import fused_kda_gate
from deltic.fla.ops.utils import chunk_local_cumsum, solve_tril
from deltic.fla.ops.utils.constant import RCP_LN2
from deltic.layers import Cache, DeltaNet, GatedDeltaNet, KimiDeltaAttention
from support import BLOCK_CALLS, BUDGET, Case, block_tensors, check_against_oracle, error, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = "cuda"
SHAPES = [
    {"gate": "head", "H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16},
    {"gate": "channel", "form": "bounded", "K": 128, "V": 128, "dtype": torch.bfloat16},
    {"gate": "none", "K": 64, "V": 64, "dtype": torch.float16},
    {"gate": "channel", "form": "softplus", "K": 40, "V": 24, "dtype": torch.float32},
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['gate']}-{s['K']}")
LAYERS = {
    "DeltaNet": lambda: DeltaNet(hidden_size=64, num_heads=2, layer_idx=0),
    "GatedDeltaNet": lambda: GatedDeltaNet(
        hidden_size=64, head_dim=32, num_heads=2, num_v_heads=4, conv_bias=True, layer_idx=0
    ),
    "KDA": lambda: KimiDeltaAttention(hidden_size=64, head_dim=32, num_heads=2, layer_idx=0),
}
layers = pytest.mark.parametrize("name", LAYERS)


def moved(case: Case) -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in case.tensors.items()}


def forward(case: Case, device: str, **options):
    """Outputs of a case on a device, back on the CPU."""
    tensors = {name: x.to(device) for name, x in case.tensors.items()}
    given = {**case.options, "output_final_state": True, **options}
    with torch.no_grad():
        o, state = deltic.delta_rule(**tensors, **given)
    return o.cpu(), state.cpu()


def oracle(case: Case):
    wide = {n: x.double() if x.is_floating_point() else x for n, x in case.tensors.items()}
    return forward(Case(wide, case.options), "cpu", impl="reference")


# Values


@shapes
@pytest.mark.parametrize("lengths", [None, [130, 0, 64, 7]])
def test_delta_rule(shape, lengths):
    case = make(lengths=lengths, T=150, **shape)
    found = forward(case, DEVICE)
    budget = BUDGET[shape["dtype"]]["o"]
    for x, reference in zip(found, oracle(case), strict=True):
        assert error(x, reference) <= budget
    again = forward(case, DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@shapes
def test_recurrent(shape):
    case = make(lengths=[3, 0, 1], **shape)
    with torch.no_grad():
        o, state = deltic.recurrent(**moved(case), **case.options, output_final_state=True)
    reference = oracle(case)
    assert o.device.type == DEVICE
    assert error(o.cpu(), reference[0]) <= BUDGET[shape["dtype"]]["o"]
    assert error(state.cpu(), reference[1]) <= BUDGET[torch.float32]["o"]


def test_decode_updates_the_pool():
    case = make(B=3, T=1, K=128, V=128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    pool = torch.randn(5, 4, 128, 128, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([4, 0, 2])
    expected, ours = pool.clone(), pool.to(DEVICE, copy=True)
    with torch.no_grad():
        o = deltic.decode(**case.tensors, state_pool=expected, read_index=index)
        found = deltic.decode(**moved(case), state_pool=ours, read_index=index.to(DEVICE))
    assert error(found.cpu(), o) <= BUDGET[torch.bfloat16]["o"]
    assert error(ours.cpu(), expected) <= BUDGET[torch.float32]["o"]
    assert torch.equal(ours[[1, 3]].cpu(), pool[[1, 3]])


def test_prefill_into_the_pool():
    case = make(lengths=[70, 3], K=128, V=128, dtype=torch.bfloat16, state=False)
    pool = torch.randn(4, 2, 128, 128, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([3, 1])
    expected, ours = pool.clone(), pool.to(DEVICE, copy=True)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in case.tensors.items()}
    with torch.no_grad():
        deltic.delta_rule(**moved(case), state_pool=ours, read_index=index.to(DEVICE))
        o, state = deltic.delta_rule(
            **wide, initial_state=pool[index].double(), output_final_state=True, impl="reference"
        )
    expected[index] = state.float()
    assert error(ours.cpu(), expected) <= BUDGET[torch.bfloat16]["o"]
    assert torch.equal(ours[[0, 2]].cpu(), pool[[0, 2]])


@shapes
def test_two_forms_are_two_calls(shape):
    """Bits of a prefill and a decode, gradients of the chunked form, in a replayed graph too."""
    case = make(T=100, B=2, **shape)
    rows = {n: x for n, x in moved(case).items() if n != "initial_state"}
    flat = ("A_log", "dt_bias")
    kind = {**case.options, **{n: rows.pop(n) for n in flat if n in rows}, "split": "off"}
    kind.pop("output_final_state", None)
    from_ = torch.tensor([64, 30], device=DEVICE)

    def call():
        with torch.no_grad():
            return deltic.delta_rule(**rows, **kind, recurrent_from=from_, output_final_state=True)

    def check(o, state):
        for n, first in enumerate(from_.tolist()):
            part = {name: x[n : n + 1] for name, x in rows.items()}
            with torch.no_grad():
                before, pool = deltic.delta_rule(
                    **{name: x[:, :first] for name, x in part.items()},
                    **kind,
                    output_final_state=True,
                )
                rest = {name: x[:, first:] for name, x in part.items()}
                words = {name: x for name, x in kind.items() if name != "split"}
                after = deltic.decode(**rest, **words, state_pool=pool)
            assert torch.equal(o[n], torch.cat([before, after], 1)[0])
            assert torch.equal(state[n], pool[0])

    check(*call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call()
    from_.copy_(torch.tensor([3, 100]))
    graph.replay()
    check(o, state)
    if not HAS_CUDA_BACKWARD:
        return
    found = []
    for form in ({}, {"recurrent_from": from_}):
        given = {name: x.detach().requires_grad_() for name, x in rows.items()}
        o, _ = deltic.delta_rule(**given, **kind, **form)
        found.append(torch.autograd.grad(o.float().sum(), tuple(given.values())))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_strided_views():
    """Views that no tensor copy of the GPU takes as they are: heads first, one element off."""
    case = make(T=100, K=64, V=64, dtype=torch.bfloat16)
    expected = forward(case, DEVICE)
    tensors = moved(case)
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    heads = tensors["beta"].shape[2]
    wide = torch.zeros(2, 100, heads + 3, device=DEVICE)
    tensors["beta"] = wide[..., 1 : 1 + heads].copy_(tensors["beta"])
    with torch.no_grad():
        o, state = deltic.delta_rule(**tensors, **case.options, output_final_state=True)
    assert error(o.cpu(), expected[0]) <= BUDGET[torch.bfloat16]["o"]
    assert error(state.cpu(), expected[1]) <= BUDGET[torch.bfloat16]["o"]


def test_building_blocks():
    generator = torch.Generator().manual_seed(0)
    g = -torch.rand(2, 100, 3, 64, generator=generator)
    k = torch.nn.functional.normalize(torch.randn(2, 100, 3, 64, generator=generator), dim=-1)
    v, beta = (
        torch.randn(2, 100, 3, 32, generator=generator),
        torch.rand(2, 100, 3, generator=generator),
    )
    G = deltic.chunk_cumsum(g)
    A = deltic.kkt(k, g=G, beta=beta)
    inverse = deltic.inverse(A)
    for name, function, arguments, options in (
        ("cumsum", deltic.chunk_cumsum, (g,), {}),
        ("l2norm", deltic.l2norm, (k,), {}),
        ("kkt", deltic.kkt, (k,), {"g": G, "beta": beta}),
        ("scores", deltic.scores, (k, k), {"g": G}),
        ("inverse", deltic.inverse, (A,), {}),
        ("wy", deltic.wy, (k, inverse), {"v": v, "g": G, "beta": beta}),
    ):
        with torch.no_grad():
            expected = function(*arguments, **options)
            there = {key: x.to(DEVICE) for key, x in options.items()}
            found = function(*(x.to(DEVICE) for x in arguments), **there)
        if isinstance(expected, torch.Tensor):
            found, expected = (found,), (expected,)
        for x, y in zip(found, expected, strict=True):
            if y is not None:
                assert x.device.type == DEVICE and error(x.cpu(), y) <= 1e-4, name


def test_the_other_names():
    """deltic.fla with tensors on the GPU."""
    for shape, function in (
        (SHAPES[0], deltic.fla.ops.gated_delta_rule.chunk_gated_delta_rule),
        ({**SHAPES[1], "form": "log_decay"}, deltic.fla.ops.kda.chunk_kda),
    ):
        case = make(lengths=[130, 64, 7], **shape)
        with torch.no_grad():
            o, state = function(**moved(case), output_final_state=True)
        reference = oracle(case)
        assert error(o.cpu(), reference[0]) <= BUDGET[torch.bfloat16]["o"]
        assert error(state.cpu(), reference[1]) <= BUDGET[torch.bfloat16]["o"]


def test_autocast():
    case = make(T=70, K=64, V=64)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        o, state = deltic.delta_rule(**moved(case), output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert error(o.cpu(), oracle(case)[0]) <= 2e-2


# What stands beside the delta rule: as the CPU has it, gradients too


def beside(function, *tensors, **options):
    """A function's results and gradients on the CPU and on the GPU, the latter brought back."""
    found = []
    for device in ("cpu", DEVICE):
        own = [None if x is None else x.detach().to(device).requires_grad_() for x in tensors]
        y = function(*own, **options)
        y = y[0] if isinstance(y, tuple) else y
        dy = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y)
        grads = torch.autograd.grad(y, [x for x in own if x is not None], dy)
        found.append([x.detach().cpu() for x in (y, *grads)])
    return found


def pieces(*outputs):
    """Outputs of several shapes as one tensor."""
    return torch.cat([x.flatten() for x in outputs if x is not None])


# Building blocks as functions of tensors by name and of cu_seqlens.
BLOCKS = {
    "g A_log dt_bias": lambda g, A_log, dt_bias, cu: pieces(
        deltic.chunk_cumsum(g, gate="softplus", A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu),
        deltic.log_decay(g, gate="softplus", A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu),
        deltic.chunk_cumsum(g, reverse=True, cu_seqlens=cu),
    ),
    "q": lambda q, cu: deltic.l2norm(q, cu_seqlens=cu).y,
    "k G beta": lambda k, G, beta, cu: deltic.kkt(k, g=G, beta=beta, cu_seqlens=cu),
    "q k G": lambda q, k, G, cu: deltic.scores(q, k, g=G, cu_seqlens=cu),
    "a": lambda a, cu: deltic.inverse(a, cu_seqlens=cu),
    "q k G beta": lambda q, k, G, beta, cu: pieces(
        *deltic.scores_inverse(q, k, g=G, beta=beta, cu_seqlens=cu)
    ),
    "k a v G beta q": lambda k, a, v, G, beta, q, cu: pieces(
        *deltic.wy(k, a, v=v, g=G, beta=beta, q=q, output_kg=True, cu_seqlens=cu)
    ),
}


@pytest.mark.parametrize("names", BLOCKS)
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("lengths", [None, [70, 0, 13, 64]])
def test_gradients_of_building_blocks(names, gate, lengths):
    case = make(T=147, lengths=lengths, gate=gate, form="softplus", H=2, HV=4, K=40, V=24)
    x, cu = case.tensors, case.tensors.get("cu_seqlens")
    x["G"] = deltic.chunk_cumsum(-torch.rand(x["g"].shape), cu_seqlens=cu)
    x["a"] = deltic.kkt(x["k"], g=x["G"], beta=x["beta"], cu_seqlens=cu)

    def function(*tensors):
        lists = None if cu is None else cu.to(tensors[0].device)
        return BLOCKS[names](*tensors, lists)

    expected, found = beside(function, *(x[name] for name in names.split()))
    for name, y, reference in zip(["out", *names.split()], found, expected, strict=True):
        assert error(y, reference) <= 2e-4, name


def test_gradients_of_fla_kernels():
    """deltic.fla's functions inside of chunks and its fused gates."""
    x = make(T=150, H=2, HV=2, K=40, V=24, gate="head", state=False).tensors
    G = chunk_local_cumsum(x["g"], 64, scale=RCP_LN2)

    def pair(k, v, beta, G):
        A = solve_tril(chunk_scaled_dot_kkt_fwd(k, G, beta, chunk_size=64))
        return pieces(*recompute_w_u_fwd(k, v, beta, A, G))

    raw, A_log, dt_bias = torch.randn(2, 150, 2, 40), torch.rand(2), torch.randn(80)
    for function, tensors in (
        (pair, (x["k"], x["v"], x["beta"], G)),
        (fused_kda_gate, (raw, A_log, dt_bias)),
    ):
        expected, found = beside(function, *tensors)
        for i, (y, reference) in enumerate(zip(found, expected, strict=True)):
            assert error(y, reference) <= 2e-4, (function, i)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_gradients_of_a_decay_per_value_column(gate):
    case = make(T=70, gate=gate, H=2, HV=4, K=40, V=24)
    case.tensors["gv"] = -torch.rand(case.tensors["v"].shape)
    check_against_oracle(Case(moved(case), case.options, deltic.recurrent))


@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_blocks_as_torch_knows_them(name):
    op = getattr(torch.ops.deltic, name).default
    torch.library.opcheck(op, BLOCK_CALLS[name](block_tensors(DEVICE)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [33, 256])
def test_convolution(dtype, D):
    torch.manual_seed(0)
    x, state = torch.randn(1, 70, D).to(dtype), torch.randn(3, D, 3).to(dtype)
    weight, bias = torch.randn(D, 4), torch.randn(D)

    def packed(x, weight, bias, state):
        offsets = torch.tensor([0, 30, 31, 70], device=x.device)
        return deltic.causal_conv1d(
            x, weight, bias, activation="silu", initial_state=state, cu_seqlens=offsets
        )

    budget = 1e-5 if dtype == torch.float32 else 6e-3
    expected, found = beside(packed, x, weight, bias, state)
    assert all(error(a, b) <= budget for a, b in zip(found, expected, strict=True))


def test_convolution_by_steps():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 12, 64, device=DEVICE), torch.randn(64, 4, device=DEVICE)
    whole, _ = deltic.causal_conv1d(x, weight, activation="silu")
    state, steps = x.new_zeros(4, 64, 3), []
    for t in range(12):
        steps.append(deltic.causal_conv1d_update(x[:, t], state, weight, activation="silu"))
    assert torch.equal(torch.stack(steps, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [20, 128, 1024])
def test_gated_norm(dtype, D):
    torch.manual_seed(0)
    x, z, weight = torch.randn(2, 9, 3, D).to(dtype), torch.randn(2, 9, 3, D).to(dtype), None
    for weight in (None, torch.rand(D)):
        expected, found = beside(deltic.rms_norm, x, weight, z, activation="sigmoid")
        budget = 1e-5 if dtype == torch.float32 else 6e-3
        assert all(error(a, b) <= budget for a, b in zip(found, expected, strict=True))


# Layers: all of their operators run here


@layers
def test_layers(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(3, 70, 64)
    mask = torch.ones(3, 70, dtype=torch.long)
    mask[1, :20] = 0
    mask[2, :69] = 0
    offsets = torch.tensor([0, 30, 31, 70])
    with torch.no_grad():
        expected = [layer(x)[0], layer(x, attention_mask=mask)[0]]
        expected.append(layer(x[:1], cu_seqlens=offsets)[0])
        layer, x = layer.to(DEVICE), x.to(DEVICE)
        found = [layer(x)[0], layer(x, attention_mask=mask.to(DEVICE))[0]]
        found.append(layer(x[:1], cu_seqlens=offsets.to(DEVICE))[0])
    for ours, reference in zip(found, expected, strict=True):
        assert error(ours.cpu(), reference) <= 1e-3


@layers
def test_layers_token_by_token(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().to(DEVICE)
    x = torch.randn(2, 12, 64, device=DEVICE)
    with torch.inference_mode():
        expected = layer(x)[0]
        cache, found = Cache(), []
        for part in x.split([8, 1, 1, 2], dim=1):
            o, _, cache = layer(part, past_key_values=cache, use_cache=True)
            found.append(o)
    assert error(torch.cat(found, dim=1), expected) <= 1e-3


# Gradients


def test_gradients_or_their_absence():
    """Never a wrong gradient: they are right, or forward says that there are none."""
    case = make(T=70, K=64, V=64)
    if HAS_CUDA_BACKWARD:
        check_against_oracle(Case(moved(case), case.options))
        return
    tensors = moved(case)
    tensors["v"].requires_grad_()
    for function in (deltic.delta_rule, deltic.recurrent):
        with pytest.raises(NotImplementedError, match="requires_grad: expected CPU tensors"):
            function(**tensors)
    with torch.no_grad():
        deltic.delta_rule(**tensors)


# Streams, graphs, compilers


def test_a_stream_of_its_own():
    """Inputs that are written late on another stream: a call elsewhere would read the zeros."""
    case = make(T=300, **SHAPES[0])
    expected = forward(case, DEVICE)
    source = moved(case)
    tensors = {name: torch.zeros_like(x) for name, x in source.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        for name, x in source.items():
            tensors[name].copy_(x)
        found = deltic.delta_rule(**tensors, **case.options, output_final_state=True)
    stream.synchronize()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=["head", "channel"])
def test_a_graph(shape):
    case = make(lengths=[130, 64, 0], **shape)
    tensors = moved(case)
    tensors["cu_seqlens"] = tensors["cu_seqlens"].int()

    def call():
        with torch.no_grad():
            return deltic.delta_rule(
                **tensors, **case.options, output_final_state=True, split="off"
            )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call()
    for offsets in ([0, 130, 194, 194], [0, 10, 150, 150], [0, 0, 0, 64]):
        tensors["cu_seqlens"].copy_(torch.tensor(offsets))
        o.fill_(float("nan"))
        state.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = call()
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
        assert not o[:, offsets[-1] :].any()


def test_a_graph_of_intermediate_states():
    """deltic.fla's chunk_kda with packed sequences: captured once, replayed with other lengths."""
    case = make(lengths=[130, 64, 6], gate="channel", K=128, V=128, dtype=torch.bfloat16)
    tensors = moved(case)
    tensors["cu_seqlens"] = tensors["cu_seqlens"].int()

    def call(use_graph=True):
        with torch.no_grad():
            return deltic.fla.ops.kda.chunk_kda(
                **tensors,
                output_final_state=True,
                return_intermediate_states=True,
                use_graph=use_graph,
                max_num_seqs=3,
            )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for offsets in ([0, 130, 194, 200], [0, 10, 150, 150], [0, 0, 0, 64], [0, 200, 200, 200]):
        tensors["cu_seqlens"].copy_(torch.tensor(offsets))
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = call(use_graph=False)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        used = expected[2].shape[1]
        assert found[2].shape[1] == 4 + 3 - 1
        assert torch.equal(found[2][:, :used], expected[2]) and not found[2][:, used:].any()


@pytest.mark.parametrize("lengths", [None, [130, 0, 64, 6]])
def test_states_and_outputs_by_stages(lengths):
    """deltic.fla's functions inside of the chunked form, whose sums torch makes."""
    x = make(T=200, gate="head", H=2, HV=4, K=64, V=32, lengths=lengths).tensors
    results = []
    for device in ("cpu", DEVICE):
        t = {name: y.to(device) for name, y in x.items()}
        cu = t.get("cu_seqlens")
        G = chunk_local_cumsum(t["g"], 64, scale=RCP_LN2, cu_seqlens=cu)
        rows = (t["q"], t["k"])
        w = torch.nn.functional.normalize(t["k"].repeat_interleave(2, 2), dim=-1) * 0.3
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            t["k"], w, t["v"], G, None, t["initial_state"], True, cu_seqlens=cu
        )
        o = chunk_fwd_o(*rows, v_new, h, G, cu_seqlens=cu)
        local = chunk_bwd_dv_local(*rows, t["v"], G, cu_seqlens=cu)
        dh, dh0, dv = chunk_gated_delta_rule_bwd_dhu(
            *rows, w, t["v"], local, G, None, t["initial_state"], cu_seqlens=cu
        )
        gradients = chunk_bwd_dqkwg(*rows, v_new, t["v"], h, dh, w, G, dv=dv, cu_seqlens=cu)
        results.append((G, h, v_new, final, o, local, dh, dh0, dv, *gradients))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert ours.device.type == DEVICE and error(ours.cpu(), expected) <= 1e-4


def test_a_graph_of_decode():
    case = make(B=3, T=1, K=128, V=128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    tensors = moved(case)
    pool = torch.zeros(5, 4, 128, 128, device=DEVICE)
    index = torch.tensor([4, 0, 2], device=DEVICE)

    def call(states):
        with torch.no_grad():
            return deltic.decode(**tensors, state_pool=states, read_index=index)

    call(pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(pool)
    pool.zero_()
    expected = torch.zeros_like(pool)
    for _ in range(3):
        graph.replay()
        again = call(expected)
        assert torch.equal(o, again) and torch.equal(pool, expected)


def test_nothing_waits_for_the_gpu():
    """No call of torch that would wait, with lengths and indices on the GPU."""
    case = make(lengths=[130, 64, 0], **SHAPES[0])
    tensors = moved(case)
    pool = torch.zeros(4, 4, 128, 128, device=DEVICE)
    index = torch.tensor([2, 0, 1], device=DEVICE)
    rows = {name: x for name, x in tensors.items() if name != "initial_state"}
    calls = (
        lambda: deltic.delta_rule(**tensors, output_final_state=True),
        lambda: deltic.delta_rule(**rows, state_pool=pool, read_index=index),
        lambda: deltic.decode(**rows, state_pool=pool, read_index=index),
    )
    with torch.no_grad():
        for call in calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(100_000_000)
            end = torch.cuda.Event()
            begin = time.perf_counter()
            for call in calls:
                call()
            spent = time.perf_counter() - begin
            end.record()
            is_done = end.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not is_done, f"{spent * 1e3:.1f} ms: a call waited for the GPU"


def test_compiled():
    """A graph of torch.compile, without the code generator, which a GPU machine may not have."""
    case = make(T=100, **SHAPES[0])
    tensors = moved(case)

    def call(q, k, v, g, beta, initial_state):
        o, state = deltic.delta_rule(
            q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True
        )
        return o * 2, state

    with torch.no_grad():
        o, state = torch.compile(call, backend="aot_eager", fullgraph=True)(**tensors)
        expected = call(**tensors)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_operator_as_torch_knows_it():
    case = make(T=70, **SHAPES[0])
    t = moved(case)
    arguments = (t["q"], t["k"], t["v"], t["beta"], t["g"], None, None, t["initial_state"])
    torch.library.opcheck(
        torch.ops.deltic.forward.default,
        (*arguments, None, None, None, None, "final"),
        test_utils=("test_schema", "test_faketensor"),
    )


# Errors


@pytest.mark.parametrize("name", ["beta", "k", "initial_state", "cu_seqlens"])
def test_devices_must_agree(name):
    case = make(lengths=[64, 6], **SHAPES[0])
    tensors = moved(case)
    tensors[name] = tensors[name].cpu()
    with pytest.raises((ValueError, RuntimeError), match=name), torch.no_grad():
        deltic.delta_rule(**tensors)
    forward(case, DEVICE)  # and the GPU is as before


def test_wrong_arguments_leave_the_gpu_usable():
    case = make(T=70, **SHAPES[0])
    tensors = moved(case)
    with torch.no_grad():
        with pytest.raises(ValueError, match="delta_rule: g: expected"):
            deltic.delta_rule(**{**tensors, "g": tensors["g"][:, :-1]})
        with pytest.raises(NotImplementedError, match="cpu"):
            deltic.delta_rule(**tensors, impl="cpu.plain")
        with pytest.raises(ValueError, match="cu_seqlens_cpu: expected"):
            packed = {name: x[:1] for name, x in tensors.items()}
            offsets = torch.tensor([0, 80])
            deltic.delta_rule(**packed, cu_seqlens=offsets.to(DEVICE), cu_seqlens_cpu=offsets)
    forward(case, DEVICE)


def test_out_of_memory():
    """The bytes that were asked for, in torch's own exception, and the GPU is as before."""
    x = torch.zeros(1, 1, 1, 128, device=DEVICE).expand(1, 2**30, 1, 128)  # no memory of its own
    for function, arguments in ((deltic.recurrent, (x, x, x)), (deltic.l2norm, (x,))):
        text = rf"^{function.__name__}: memory: expected {2**39} bytes on CUDA device 0, got none"
        with pytest.raises(torch.OutOfMemoryError, match=text), torch.no_grad():
            function(*arguments)
    forward(make(T=70, **SHAPES[0]), DEVICE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device():
    case = make(T=70, **SHAPES[0])
    expected = forward(case, "cuda:0")
    found = forward(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# Costs


# us beyond those of torch's own add_. Measured were 9.6 for decode and 13.2 for forward in all.
CHEAP = {"decode": 15, "forward": 20}


@pytest.mark.parametrize("name", CHEAP)
def test_a_call_is_cheap(name, capsys):
    """The host's share of an eager call, the GPU not waited for, beside that of torch's add_."""
    tokens = {"decode": 1, "forward": 128}[name]
    case = make(B=1, T=tokens, K=128, V=128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    pool = torch.zeros(4, 4, 128, 128, device=DEVICE)
    tensors = moved(case)
    index, x = torch.tensor([1], device=DEVICE), torch.zeros(64, device=DEVICE)
    calls = {
        "decode": lambda: deltic.decode(**tensors, state_pool=pool, read_index=index),
        "forward": lambda: deltic.delta_rule(**tensors, qk_l2norm=True),
    }

    def microseconds(call):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            call()
        return (time.perf_counter() - begin) / 200 * 1e6

    with torch.inference_mode():
        both = [calls[name], lambda: x.add_(1)]
        runs = [[microseconds(call) for call in both] for _ in range(11)]
    ours, add = (min(times) for times in zip(*runs, strict=True))
    with capsys.disabled():
        print(f"{name}, host time per call: {ours:.1f} us, add_: {add:.1f} us")
    assert ours <= add + CHEAP[name]


def test_checked_mode_raises(monkeypatch):
    case = make(lengths=[70, 0, 64], **SHAPES[0])
    monkeypatch.setenv("DELTIC_CHECKED", "1")
    expected = forward(case, "cuda")
    right = case.tensors["cu_seqlens"]
    case.tensors["cu_seqlens"] = torch.tensor([0, 70, 60, 134])
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that never decrease, got"):
        forward(case, "cuda")
    case.tensors["cu_seqlens"] = right
    case.tensors["k"] = case.tensors["k"].clone()
    case.tensors["k"][0, 71, 1, 3] = float("nan")
    with pytest.raises(ValueError, match="k: expected finite values, got nan at sequence 2, token"):
        forward(case, "cuda")
    case.tensors["k"][0, 71, 1, 3] = 0.0
    monkeypatch.setenv("DELTIC_CHECKED", "0")
    again = forward(case, "cuda")
    assert torch.equal(again[0][:, :70], expected[0][:, :70])


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_scores_inverse(gate):
    case = make(T=150, H=2, HV=4, K=64, gate=gate, dtype=torch.float16)
    q, k, beta = (case.tensors[n] for n in ("q", "k", "beta"))
    G = deltic.chunk_cumsum(case.tensors["g"])
    found = deltic.scores_inverse(*(x.cuda() for x in (q, k)), g=G.cuda(), beta=beta.cuda())
    wide = {"g": G.double(), "beta": beta.double(), "impl": "reference"}
    expected = deltic.scores_inverse(q.double(), k.double(), **wide)
    assert error(found[0].cpu(), expected[0]) <= BUDGET[torch.float16]["o"]
    assert error(found[1].cpu(), expected[1]) <= BUDGET[torch.float16]["o"]
